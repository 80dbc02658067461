"""Detokenization, one token at a time.

Invariant: all pieces together, including the last one from `flush`, equal `tokenizer.decode(ids,
skip_special_tokens=..., clean_up_tokenization_spaces=False)`. This holds for any grouping of the
ids, and the cost per token does not grow with the answer. If an answer continues its prompt
(`TextStart.CONTINUATION`), `prompt_text` and all pieces together equal the decoding of prompt and
answer together; the cost does not grow with the prompt either.

Decoding the last few ids again, as is common, cannot keep that invariant: a decoder may treat the
first token specially, drop a leading space, or interpret bytes by what follows them. So the
tokenizer's decoder determines which one of three classes is used:

    ByteLevelDetokenizer  every token is bytes, the text is UTF-8 with errors replaced
                          (gpt2, llama 3)
    PieceDetokenizer      every token is a piece of text; the first may differ; a run of byte
                          tokens is decoded as a whole (llama 2, t5, bert)
    WindowDetokenizer     any other decoder: decodes a window again, and holds back uncertain text

The first two are used only if they agree with the tokenizer on a few hundred random answers.

Limits of the invariant: if a run of byte tokens turns out not to be UTF-8, its valid characters
have been returned already if it has more than `MAX_RUN_TOKENS` or begins in the prompt
(`PieceDetokenizer`). `WindowDetokenizer` returns text after at most `MAX_PENDING_TOKENS`, which a
decoder without any locality can contradict.

Cleanup of spaces (" ." to ".") is never applied: it would change text that the model intended.
"""

from __future__ import annotations

import enum
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

from swell.cluster.text.tokens.byte_level_detokenizer import ByteLevelDetokenizer, ByteTable
from swell.cluster.text.tokens.incremental_detokenizer import (
    Decode,
    IncrementalDetokenizer,
    WindowDetokenizer,
)
from swell.cluster.text.tokens.piece_detokenizer import (
    DecoderShape,
    PieceDetokenizer,
    PieceTable,
    byte_of_token,
)


class TextStart(enum.Enum):
    """How the text of an answer begins."""

    NEW_TEXT = enum.auto()
    """A separate text: a space that the tokenizer puts in front of every text is dropped."""
    CONTINUATION = enum.auto()
    """The continuation of the prompt's text."""
    VERBATIM = enum.auto()
    """Exactly the text that its tokens spell, which is how a grammar reads them."""


def _flat(stage: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the stages of a decoder, with sequences flattened."""
    if stage["type"] != "Sequence":
        return [stage]
    return [inner for part in stage["decoders"] for inner in _flat(part)]


class Detokenizer:
    """Creates the detokenizers of a tokenizer's answers, which share its tables.

    `tokenizer` is one of transformers', or a `tokenizers.Tokenizer`, or None for no text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._backend = backend if isinstance(backend, Tokenizer) else None
        added = {} if self._backend is None else self._backend.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._start = {skip: self._choose_detokenizer(skip) for skip in (False, True)}

    def start(
        self,
        skip_special_tokens: bool = True,
        text_start: TextStart = TextStart.NEW_TEXT,
        prompt_token_ids: Sequence[int] = (),
    ) -> IncrementalDetokenizer:
        """Returns the detokenizer of a new answer to a prompt. After a prompt of only special
        tokens, every answer begins a new text."""
        incremental = self._start[skip_special_tokens]()
        has_text = not self._special.issuperset(prompt_token_ids)
        if text_start is TextStart.VERBATIM:
            incremental.skip_beginning()
        elif text_start is TextStart.CONTINUATION and has_text:
            incremental.prime_with_prompt(prompt_token_ids)
        return incremental

    def prompt_text(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Returns the text of a prompt that an answer continues, without an incomplete character at
        its end, which belongs to the answer. Takes as long as decoding all ids."""
        incremental = self._start[skip_special_tokens]()
        return "".join(map(incremental.push, token_ids)) + incremental.finish_prompt()

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Decodes the whole text at once: the right side of the invariant."""
        if self._tokenizer is None:
            return ""
        if self._tokenizer is self._backend:
            return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))
        return str(
            self._tokenizer.decode(
                token_ids,
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    def _choose_detokenizer(self, skip: bool) -> Callable[[], IncrementalDetokenizer]:
        if self._tokenizer is None:
            return IncrementalDetokenizer

        def decode(token_ids: list[int]) -> str:
            return self.decode(token_ids, skip)

        try:
            incremental = self._exact_detokenizer(decode, skip)
            if incremental is not None and self._agrees(incremental, decode):
                return incremental
        except ValueError:
            pass  # a decoder that only looked like a known one
        return lambda: WindowDetokenizer(decode)

    def _exact_detokenizer(
        self, decode: Decode, skip: bool
    ) -> Callable[[], IncrementalDetokenizer] | None:
        if self._backend is None:
            return None
        added = self._backend.get_added_tokens_decoder().values()
        special = frozenset(token.content for token in added if token.special and skip)
        decoder = self._backend.decoder
        stages = [] if decoder is None else _flat(json.loads(decoder.__getstate__()))
        if [stage["type"] for stage in stages] in (["ByteLevel"], ["ByteLevel", "Fuse"]):
            bytes_of = ByteTable(self._backend, special)
            return lambda: ByteLevelDetokenizer(bytes_of)
        shape = DecoderShape.parse(stages)
        if shape is None:
            return None
        pieces = PieceTable(decode, self._backend, special, shape)
        return lambda: PieceDetokenizer(pieces)

    def _agrees(self, incremental: Callable[[], IncrementalDetokenizer], decode: Decode) -> bool:
        """Compares random answers, half of them with many added tokens, single bytes and blanks."""
        assert self._backend is not None
        vocab = self._backend.get_vocab()
        rare = sorted(self._backend.get_added_tokens_decoder())
        rare += sorted(
            token_id
            for token, token_id in vocab.items()
            if byte_of_token(token) is not None or not token.strip(" \u2581")
        )
        size, draw = max(vocab.values(), default=0) + 2, random.Random(0)
        for trial in range(200):
            pool = rare if rare and trial % 2 else range(size)
            ids = [
                draw.choice(pool) if draw.random() < 0.7 else draw.randrange(size)
                for _ in range(draw.randint(1, 16))
            ]
            text = incremental()
            if "".join(map(text.push, ids)) + text.flush() != decode(ids):
                return False
        return True
