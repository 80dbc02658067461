"""Detokenization for byte-level decoders, whose tokens are bytes of UTF-8."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import count

from tokenizers import Tokenizer

from swell.cluster.text.tokens.incremental_detokenizer import (
    MAX_CHARACTER_BYTES,
    IncrementalDetokenizer,
)


class ByteTable(dict[int, bytes]):
    """Maps a token id to the bytes that it stands for under a byte-level decoder; filled on use."""

    def __init__(self, backend: Tokenizer, special: frozenset[str]) -> None:
        super().__init__()
        self._backend = backend
        self._special = special
        self.whole_texts = _WholeTexts(self)

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        self[token_id] = data = b"" if token is None or token in self._special else to_bytes(token)
        return data


class _WholeTexts(dict[int, str]):
    """Maps the id of a token that consists of complete characters to its text, other ids to ""."""

    def __init__(self, table: ByteTable) -> None:
        super().__init__()
        self._table = table

    def __missing__(self, token_id: int) -> str:
        try:
            text = self._table[token_id].decode()
        except UnicodeDecodeError:
            text = ""
        self[token_id] = text
        return text


def to_bytes(token: str) -> bytes:
    """Returns the bytes of a token. A token outside the byte alphabet, such as an added one with a
    space, is its own text."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_of_char() -> dict[str, int]:
    """Returns GPT-2's alphabet: printable bytes map to themselves, the others to U+0100 and
    following."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = count(256)
    return {chr(byte if byte in printable else next(others)): byte for byte in range(256)}


_BYTE_OF_CHAR = _byte_of_char()
Utf8 = codecs.getincrementaldecoder("utf-8")


class ByteLevelDetokenizer(IncrementalDetokenizer):
    """Detokenizes bytes of UTF-8, which is self-synchronizing: the last few tokens show which
    character is incomplete. While none is, a token of complete characters does not need the
    decoder, whose state would not change."""

    TAIL_TOKENS = 16

    def __init__(self, table: ByteTable) -> None:
        self.table = table
        self._whole_texts = table.whole_texts
        self._decoder = Utf8("replace")
        self._is_character_open = False

    def push(self, token_id: int) -> str:
        text = self._whole_texts[token_id]
        if text and not self._is_character_open:
            return text
        text = self._decoder.decode(self.table[token_id])
        self._is_character_open = bool(self._decoder.getstate()[0])
        return text

    def flush(self) -> str:
        self._is_character_open = False
        return self._decoder.decode(b"", True)

    def token_bytes(self, token_id: int, *, at_beginning: bool = False) -> bytes:
        return self.table[token_id]

    def whole_text(self, token_id: int) -> str:
        return self._whole_texts[token_id]

    def _context_tokens(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Returns as few of the last tokens as can hold one whole character."""
        tail, size = super()._context_tokens(token_ids), 0
        for place in reversed(range(len(tail))):
            size += len(self.table[tail[place]])
            if size >= MAX_CHARACTER_BYTES:
                return tail[place:]
        return tail
