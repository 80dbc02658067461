"""Detokenization for decoders whose tokens are pieces of text or bytes. The first piece may
differ."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from swell.cluster.text.tokens.byte_level_detokenizer import Utf8
from swell.cluster.text.tokens.incremental_detokenizer import (
    MAX_CHARACTER_BYTES,
    REPLACEMENT,
    Decode,
    IncrementalDetokenizer,
)

MAX_RUN_TOKENS = 64
_INNER_BYTES = range(0x80, 0xC0)
"""Bytes of a character after the first."""
_BYTE_TOKEN = re.compile(r"<0x([0-9a-fA-F]{2})>")
_STAGES = re.compile(r"(Replace ?|Strip ?)*(?P<bytes>ByteFallback ?)?(Fuse ?(?P<strip>Strip)?)?")
"""Decoder stages that are supported: stages that read one token at a time, then at most
ByteFallback, then at most Fuse, then at most a Strip of the beginning."""


class DecoderShape(NamedTuple):
    """The properties of a decoder's stages that `PieceDetokenizer` needs; `parse` returns None for
    other decoders."""

    first_differs: bool = False
    byte_fallback: bool = False
    strip_char: str = ""
    strip_chars: int = 0

    @staticmethod
    def parse(stages: list[dict[str, Any]]) -> DecoderShape | None:
        kinds = [stage["type"] for stage in stages]
        if not kinds or kinds in (["Metaspace"], ["WordPiece"]):
            return DecoderShape(first_differs=True)
        found = _STAGES.fullmatch(" ".join(kinds))
        if found is None:
            return None
        shape, strip = DecoderShape(byte_fallback=bool(found["bytes"])), stages[-1]
        if not found["strip"]:
            return shape
        if strip["stop"]:
            return None
        return shape._replace(strip_char=strip["content"], strip_chars=strip["start"])


def byte_of_token(token: str) -> int | None:
    found = _BYTE_TOKEN.fullmatch(token)
    return int(found[1], 16) if found else None


class Piece(NamedTuple):
    """The text or byte that a token adds to a text; None if it adds nothing."""

    first: str | int | None
    """At the beginning of a text."""
    rest: str | int | None
    """After other tokens."""


class PieceTable(dict[int, Piece]):
    """Maps a token id to its piece; filled on use.

    The pieces come from the tokenizer itself: the decoding of the single id, and the text that the
    id adds after `anchor`, an ordinary word.
    """

    def __init__(
        self, decode: Decode, backend: Tokenizer, special: frozenset[str], shape: DecoderShape
    ) -> None:
        super().__init__()
        self.shape = shape
        self._decode = decode
        self._backend = backend
        self._special = special
        self._anchor = self._find_anchor()
        self._anchor_text = decode([self._anchor])

    def __missing__(self, token_id: int) -> Piece:
        self[token_id] = piece = self._piece(token_id)
        return piece

    def _piece(self, token_id: int) -> Piece:
        token = self._backend.id_to_token(token_id)
        if token is None or token in self._special:
            return Piece(None, None)
        byte = byte_of_token(token) if self.shape.byte_fallback else None
        if byte is not None:
            return Piece(byte, byte)
        text = self._decode([self._anchor, token_id])
        if not text.startswith(self._anchor_text):
            raise ValueError(f"token {token_id} changes the text before it")
        rest = text[len(self._anchor_text) :]
        return Piece(self._decode([token_id]) if self.shape.first_differs else rest, rest)

    def _find_anchor(self) -> int:
        for token, token_id in sorted(self._backend.get_vocab().items(), key=lambda item: item[1]):
            if token.isalnum() and token.isascii() and token not in self._special:
                return int(token_id)
        raise ValueError("the vocabulary has no plain word to compare with")


class _InvalidUtf8Run:
    """Decoder of a run of byte tokens that is not UTF-8: each of its bytes is replaced."""

    def decode(self, data: bytes, final: bool = False) -> str:
        return REPLACEMENT * len(data)


class PieceDetokenizer(IncrementalDetokenizer):
    TAIL_TOKENS = MAX_RUN_TOKENS

    def __init__(self, table: PieceTable) -> None:
        self.table = table
        self._started = False
        self._strip_chars = table.shape.strip_chars
        """Number of leading characters that may still be dropped."""
        self._run = bytearray()
        self._long_run: codecs.IncrementalDecoder | _InvalidUtf8Run | None = None
        """The decoder of a run that is output as it arrives."""

    @property
    def at_beginning(self) -> bool:
        return not self._started or (self._strip_chars > 0 and not self._run)

    @property
    def pending_chars(self) -> int:
        found = _characters(self._run)
        return len(self._run) if found is None else len(found[0])

    def push(self, token_id: int) -> str:
        first, rest = self.table[token_id]
        piece = rest if self._started else first
        if piece is None:
            return ""
        self._started = True
        if isinstance(piece, int):
            return self._strip(self._push_byte(piece))
        if self._run or self._long_run is not None:
            piece = self._end_run() + piece
        return self._strip(piece) if self._strip_chars else piece

    def flush(self) -> str:
        return self._strip(self._end_run())

    def finish_prompt(self) -> str:
        run, found = bytes(self._run), _characters(self._run)
        self._run.clear()
        if found is None:
            self._long_run = _InvalidUtf8Run()
            return self._strip(self._long_run.decode(run))
        text, unfinished = found
        self._run += unfinished
        return self._strip(text)

    def skip_beginning(self) -> None:
        self._started, self._strip_chars = True, 0

    def token_bytes(self, token_id: int, *, at_beginning: bool = False) -> bytes:
        piece = self.table[token_id].first if at_beginning else self.table[token_id].rest
        if isinstance(piece, int):
            return bytes([piece])
        text = piece or ""
        return (PieceDetokenizer(self.table)._strip(text) if at_beginning else text).encode()

    def whole_text(self, token_id: int) -> str:
        piece = self.table[token_id].rest
        return piece if isinstance(piece, str) else ""

    def _context_tokens(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Returns the tokens from the last piece of text on, which ends everything that was
        incomplete before it. If there is none, leaves out the end of a character that was cut
        off."""
        tail = super()._context_tokens(token_ids)
        if self.table.shape.strip_chars <= 1:
            for place in reversed(range(len(tail))):
                if self.whole_text(tail[place]):
                    return tail[place:]
        if len(tail) == len(token_ids):
            return tail
        first = 0
        while first < MAX_CHARACTER_BYTES - 1 and self.table[tail[first]].rest in _INNER_BYTES:
            first += 1
        return tail[first:]

    def _push_byte(self, byte: int) -> str:
        """Adds a byte. One byte that is not UTF-8 invalidates its whole run, so the run waits for
        its end."""
        if self._long_run is not None:
            return self._long_run.decode(bytes([byte]))
        self._run.append(byte)
        if len(self._run) <= MAX_RUN_TOKENS:
            return ""
        self._long_run = Utf8("replace")
        text = self._long_run.decode(bytes(self._run))
        self._run.clear()
        return text

    def _end_run(self) -> str:
        if self._long_run is not None:
            text = self._long_run.decode(b"", True)
            self._long_run = None
            return text
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        while self._strip_chars and text:
            if text[0] != self.table.shape.strip_char:
                self._strip_chars = 0
                break
            text = text[1:]
            self._strip_chars -= 1
        return text


def _characters(run: bytearray) -> tuple[str, bytes] | None:
    """Returns the characters of a run, and the bytes after them that begin another one; None if the
    run is not UTF-8."""
    try:
        text, size = codecs.utf_8_decode(run, "strict", False)
    except UnicodeDecodeError:
        return None
    return text, bytes(run[size:])
