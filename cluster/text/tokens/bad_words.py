"""Bad words as token sequences that an engine must never complete."""

from __future__ import annotations

from typing import Any

from swell.cluster.text.errors import BadRequest, bad_value
from swell.cluster.text.params.validate_params import num_utf8_bytes
from swell.cluster.text.tokens.tokenizer import encode_text
from swell.engine.scheduling.request_validation import MAX_BAD_WORD_TOKENS


def bad_words_token_ids(tokenizer: Any, words: list[str], *, vocab_size: int) -> list[list[int]]:
    """Returns the token sequences that write the words, each once; `tokenizer` is transformers'.

    A sequence with a token outside the model's `vocab_size` can never be completed, and is left
    out.

    A word is tokenized as at the beginning of a text, after a space and after a line end,
    regardless of its own leading spaces: each may have other tokens, and another number of them
    ("ban", "ana" but " banana"). A sequence that ends with another one is banned with that one, and
    is left out. Unlike vLLM, which ignores the second form if it has another length, this finds a
    word that a space makes shorter.

    Raises `BadRequest` for a word that is not valid text or yields no token, and for too many
    tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for index, word in enumerate(words):
        plain = _encode(tokenizer, word.lstrip(), index)
        if not plain:
            rule = (
                "has no token: spaces and line ends at its beginning are ignored; to ban a token "
                "of spaces or line ends, use logit_bias"
            )
            raise bad_value(f"bad_words[{index}]", word, rule)
        spaced = _encode(tokenizer, " " + word.lstrip(), index)
        forms = [plain, spaced, _after_line_end(tokenizer, word.lstrip(), index)]
        found |= dict.fromkeys(map(tuple, _shortest(forms)))
    sequences = [list(tokens) for tokens in found if max(tokens) < vocab_size]
    count = sum(map(len, sequences))
    if count > MAX_BAD_WORD_TOKENS:
        raise BadRequest(
            f"bad_words have {count} tokens in all tokenized forms together; at most "
            f"{MAX_BAD_WORD_TOKENS} are allowed",
            "bad_words",
        )
    return sequences


def _shortest(forms: list[list[int]]) -> list[list[int]]:
    """Leaves out empty forms, and those that end with a shorter one."""
    kept: list[list[int]] = []
    for form in sorted(filter(None, forms), key=len):
        if not any(form[-len(shorter) :] == shorter for shorter in kept):
            kept.append(form)
    return kept


def _after_line_end(tokenizer: Any, word: str, index: int) -> list[int]:
    """Returns the tokens of a word after a line end; empty if the two share a token."""
    before = _encode(tokenizer, "\n", index)
    whole = _encode(tokenizer, "\n" + word, index)
    return whole[len(before) :] if whole[: len(before)] == before else []


def _encode(tokenizer: Any, text: str, index: int) -> list[int]:
    num_utf8_bytes(f"bad_words[{index}]", text)
    return encode_text(tokenizer, text, add_special_tokens=False)
