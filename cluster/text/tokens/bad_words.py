"""Bad words as token sequences that an engine must never complete."""

from __future__ import annotations

from typing import Any

from swell.cluster.text.params.sampling_params import BadRequest, bad_value
from swell.cluster.text.params.validate_params import num_utf8_bytes
from swell.cluster.text.tokens.tokenizer import encode_text
from swell.engine.scheduling.request_validation import MAX_BAD_WORD_TOKENS


def bad_words_token_ids(tokenizer: Any, words: list[str], *, vocab_size: int) -> list[list[int]]:
    """Returns the token sequences that write the words, each once; `tokenizer` is transformers'.

    A sequence with a token outside the model's `vocab_size` can never be completed, and is left
    out.

    This follows vLLM (`SamplingParams.update_from_tokenizer`): a word is tokenized as at the
    beginning of a text and as after a space, regardless of its own leading spaces. The second form
    counts if it begins with another token and has the same length; a longer one is mostly a space
    and the first form. So a word that a space makes shorter ("ban", "ana" but " banana") is not
    found after spaces. Beyond vLLM's rule: if a tokenizer puts a space before every text, the form
    without it, as after a line end, is added.

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
        forms = [plain]
        spaced = _encode(tokenizer, " " + word.lstrip(), index)
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            forms.append(spaced)
        bare = _after_line_end(tokenizer, word.lstrip(), index)
        if bare:  # a form that ends with it is banned with it
            forms = [form for form in forms if form[-len(bare) :] != bare]
            forms.append(bare)
        found |= dict.fromkeys(map(tuple, forms))
    sequences = [list(tokens) for tokens in found if max(tokens) < vocab_size]
    count = sum(map(len, sequences))
    if count > MAX_BAD_WORD_TOKENS:
        raise BadRequest(
            f"bad_words have {count} tokens in all tokenized forms together; at most "
            f"{MAX_BAD_WORD_TOKENS} are allowed",
            "bad_words",
        )
    return sequences


def _after_line_end(tokenizer: Any, word: str, index: int) -> list[int]:
    """Returns the tokens of a word after a line end; empty if the two share a token."""
    before = _encode(tokenizer, "\n", index)
    whole = _encode(tokenizer, "\n" + word, index)
    return whole[len(before) :] if whole[: len(before)] == before else []


def _encode(tokenizer: Any, text: str, index: int) -> list[int]:
    num_utf8_bytes(f"bad_words[{index}]", text)
    return encode_text(tokenizer, text, add_special_tokens=False)
