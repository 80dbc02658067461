"""The machines that write the text of an answer, one token at a time (see `detokenizer.py`).

Each stands in one text. `push` adds a token. `follow` begins behind the text of other tokens: those
of a prompt that the answer goes on with. What these leave unfinished (the first bytes of a
character) is the beginning of the answer's text, since only the answer makes it text.

    ids:   prompt ............ | answer ...........
    text:  prompt ...... | answer .................
                         ^ `finish_prompt`: behind the last character that the prompt finishes
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer

MAX_RUN_TOKENS = 64
MAX_PENDING_TOKENS = 16
MAX_CHARACTER_BYTES = 4
_INNER_BYTES = range(0x80, 0xC0)
"""Of a character, all but the first."""
REPLACEMENT = "\ufffd"

Decode = Callable[[list[int]], str]


class IncrementalDetokenizer:
    """The text of one answer as it grows. This one is that of a model without a tokenizer: none."""

    TAIL_TOKENS = 0
    """Tokens at the end of a prompt that may matter for the text behind it."""

    @property
    def at_beginning(self) -> bool:
        """The next token may have another text than behind others."""
        return False

    @property
    def pending_chars(self) -> int:
        """Characters that are complete and not given yet."""
        return 0

    def push(self, token_id: int) -> str:
        """The text that this token makes certain."""
        return ""

    def flush(self) -> str:
        """The rest, once the answer has ended."""
        return ""

    def finish_prompt(self) -> str:
        """What was pushed is a prompt, and an answer comes: the rest of the prompt's text."""
        return ""

    def skip_beginning(self) -> None:
        """Text stands before: the next token is not the first."""

    def follow(self, token_ids: Sequence[int]) -> None:
        """Begin behind the text of these, at a cost that does not grow with their number."""
        tail = self._context_tokens(token_ids)
        if len(tail) < len(token_ids):
            self.skip_beginning()
        for token_id in tail:
            self.push(token_id)
        self.finish_prompt()

    def _context_tokens(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Those at the end on which the text behind them depends."""
        return token_ids[max(0, len(token_ids) - self.TAIL_TOKENS) :]


class ByteTable(dict[int, bytes]):
    """id -> the bytes it stands for under a byte-level decoder, filled on use."""

    def __init__(self, backend: Tokenizer, special: frozenset[str]) -> None:
        super().__init__()
        self._backend = backend
        self._special = special

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        self[token_id] = data = b"" if token is None or token in self._special else to_bytes(token)
        return data


def to_bytes(token: str) -> bytes:
    """A token outside the byte alphabet, such as an added one with a space, is its own text."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are themselves, the others follow from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHAR = _byte_of_char()
_Utf8 = codecs.getincrementaldecoder("utf-8")


class ByteLevelDetokenizer(IncrementalDetokenizer):
    """UTF-8 finds its characters again wherever it is cut, so a few tokens tell what is open."""

    TAIL_TOKENS = 16

    def __init__(self, table: ByteTable) -> None:
        self.table = table
        self._decode = _Utf8("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self.table[token_id])

    def flush(self) -> str:
        return self._decode(b"", True)

    def _context_tokens(self, token_ids: Sequence[int]) -> Sequence[int]:
        """As many as hold one character."""
        tail, size = super()._context_tokens(token_ids), 0
        for place in reversed(range(len(tail))):
            size += len(self.table[tail[place]])
            if size >= MAX_CHARACTER_BYTES:
                return tail[place:]
        return tail


class PieceTable:
    """id -> its text at the start of an answer and behind other tokens, a byte, or None.

    The pieces are asked from the tokenizer itself: what it decodes for an id alone, and what an
    id adds behind `anchor`, an ordinary word.
    """

    def __init__(
        self, decode: Decode, backend: Tokenizer, special: frozenset[str], shape: DecoderShape
    ) -> None:
        self.shape = shape
        self.first: dict[int, str | int | None] = {}
        self.rest: dict[int, str | int | None] = {}
        self._decode = decode
        self._backend = backend
        self._special = special
        self._anchor = self._find_anchor()
        self._anchor_text = decode([self._anchor])

    def fill(self, token_id: int) -> None:
        token = self._backend.id_to_token(token_id)
        if token is None or token in self._special:
            self.first[token_id] = self.rest[token_id] = None
            return
        byte = byte_of_token(token) if self.shape.byte_fallback else None
        if byte is not None:
            self.first[token_id] = self.rest[token_id] = byte
            return
        behind = self._decode([self._anchor, token_id])
        if not behind.startswith(self._anchor_text):
            raise ValueError(f"token {token_id} changes the text before it")
        self.rest[token_id] = piece = behind[len(self._anchor_text) :]
        self.first[token_id] = self._decode([token_id]) if self.shape.first_differs else piece

    def behind(self, token_id: int) -> str | int | None:
        """What a token adds behind others."""
        if token_id not in self.rest:
            self.fill(token_id)
        return self.rest[token_id]

    def at_beginning(self, token_id: int) -> str | int | None:
        """What it adds at the beginning of a text."""
        piece, shape = self.behind(token_id), self.shape
        if isinstance(piece, int):
            return piece
        text, dropped = self.first[token_id], 0
        if not isinstance(text, str):
            return text
        while dropped < shape.strip_chars and text[dropped : dropped + 1] == shape.strip_char:
            dropped += 1
        return text[dropped:]

    def _find_anchor(self) -> int:
        for token, token_id in sorted(self._backend.get_vocab().items(), key=lambda item: item[1]):
            if token.isalnum() and token.isascii() and token not in self._special:
                return int(token_id)
        raise ValueError("the vocabulary holds no plain word to compare with")


class _InvalidUtf8Run:
    """A run of byte tokens that is no UTF-8: no byte of it will be."""

    def decode(self, data: bytes, final: bool = False) -> str:
        return REPLACEMENT * len(data)


class PieceDetokenizer(IncrementalDetokenizer):
    TAIL_TOKENS = MAX_RUN_TOKENS

    def __init__(self, table: PieceTable) -> None:
        self.table = table
        self._started = False
        self._strip_chars = table.shape.strip_chars
        """Leading characters that may still be dropped."""
        self._run = bytearray()
        self._long_run: codecs.IncrementalDecoder | _InvalidUtf8Run | None = None
        """Of a run that is shown as it comes."""

    @property
    def at_beginning(self) -> bool:
        return not self._started or (self._strip_chars > 0 and not self._run)

    @property
    def pending_chars(self) -> int:
        found = _characters(self._run)
        return len(self._run) if found is None else len(found[0])

    def push(self, token_id: int) -> str:
        table = self.table
        if token_id not in table.rest:
            table.fill(token_id)
        piece = table.rest[token_id] if self._started else table.first[token_id]
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

    def _context_tokens(self, token_ids: Sequence[int]) -> Sequence[int]:
        """From the last piece of text on, which ends whatever was open before it. Where there is
        none, without the end of a character that was cut off."""
        tail = super()._context_tokens(token_ids)
        if self.table.shape.strip_chars <= 1:
            for place in reversed(range(len(tail))):
                piece = self.table.behind(tail[place])
                if piece and isinstance(piece, str):
                    return tail[place:]
        if len(tail) == len(token_ids):
            return tail
        first = 0
        while first < MAX_CHARACTER_BYTES - 1 and self.table.behind(tail[first]) in _INNER_BYTES:
            first += 1
        return tail[first:]

    def _push_byte(self, byte: int) -> str:
        """One byte that is not UTF-8 spoils its whole run, so the run waits for its end."""
        if self._long_run is not None:
            return self._long_run.decode(bytes([byte]))
        self._run.append(byte)
        if len(self._run) <= MAX_RUN_TOKENS:
            return ""
        self._long_run = _Utf8("replace")
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
    """The characters of a run, and the bytes behind them that begin another one; None: the run is
    no UTF-8."""
    try:
        text, size = codecs.utf_8_decode(run, "strict", False)
    except UnicodeDecodeError:
        return None
    return text, bytes(run[size:])


class WindowDetokenizer(IncrementalDetokenizer):
    """Decodes again from one emission before the last, and shows what has been added.

    ids: .......... | context | pending |
                    ^start    ^read
    """

    TAIL_TOKENS = MAX_PENDING_TOKENS

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._all_ids: list[int] = []
        self._window: list[int] = []
        self._read = 0
        self._context_text = ""
        self._shown: list[str] = []

    def push(self, token_id: int) -> str:
        self._all_ids.append(token_id)
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = text.startswith(self._context_text) and not text.endswith(REPLACEMENT)
        full = len(self._window) - self._read >= MAX_PENDING_TOKENS
        added = text[len(self._context_text) :]
        if not added and full:
            # Tokens without text must not push the context out of the window.
            del self._window[self._read :]
            return ""
        if not added or not (certain or full):
            return ""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._context_text = self._decode(self._window)
        self._shown.append(added)
        return added

    def flush(self) -> str:
        shown, text = "".join(self._shown), self._decode(self._all_ids)
        if text.startswith(shown):
            return text[len(shown) :]
        return self._decode(self._window)[len(self._context_text) :]


class DecoderShape:
    """What `PieceDetokenizer` must know of a decoder's stages; `parse` gives None for other
    decoders."""

    def __init__(
        self,
        *,
        first_differs: bool = False,
        byte_fallback: bool = False,
        strip_char: str = "",
        strip_chars: int = 0,
    ) -> None:
        self.first_differs = first_differs
        self.byte_fallback = byte_fallback
        self.strip_char = strip_char
        self.strip_chars = strip_chars

    @staticmethod
    def parse(stages: list[dict[str, Any]]) -> DecoderShape | None:
        """Stages that look at one token at a time, then at most ByteFallback, then at most
        Fuse, then at most a Strip of the beginning."""
        kinds = [stage["type"] for stage in stages]
        if not kinds or kinds in (["Metaspace"], ["WordPiece"]):
            return DecoderShape(first_differs=True)
        local = 0
        while local < len(kinds) and kinds[local] in ("Replace", "Strip"):
            local += 1
        tail, last = kinds[local:], stages[-1]
        byte_fallback = tail[:1] == ["ByteFallback"]
        tail = tail[1:] if byte_fallback else tail
        if tail in ([], ["Fuse"]):
            return DecoderShape(byte_fallback=byte_fallback)
        if tail == ["Fuse", "Strip"] and last["stop"] == 0:
            return DecoderShape(
                byte_fallback=byte_fallback, strip_char=last["content"], strip_chars=last["start"]
            )
        return None


def byte_of_token(token: str) -> int | None:
    if len(token) != 6 or not token.startswith("<0x") or not token.endswith(">"):
        return None
    try:
        return int(token[3:5], 16)
    except ValueError:
        return None
