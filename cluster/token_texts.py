"""What a token stands for alone: its bytes, and the text that these are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from swell.cluster.detokenizer import Detokenizer
from swell.cluster.text_machines import ByteLevelText, PieceTable, PieceText, TextMachine


class Written(NamedTuple):
    """What one token adds to a text."""

    text: str
    """What it makes certain, perhaps also of tokens before it."""
    place: int
    """Characters of what is certain then that stand before its own text."""
    at_beginning: bool
    """The tokens that could have stood there have the texts of a beginning."""


class Places(NamedTuple):
    """Where tokens stand in their text."""

    offsets: list[int]
    """For each token the characters before it; tokens that share a character share its place."""
    at_beginning: int
    """So many of the first tokens have the texts of a beginning."""


class Texts(dict[int, bytes]):
    """id -> the bytes that the token adds to a text."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """A part of a character shows as a replacement character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self[token_id].decode(errors="replace")
        return text


class TokenTexts(Texts):
    """id -> the bytes that the token adds behind others, filled on use; special tokens too.

    Exact for the tokenizers that `detokenizer` reads; for others it is the decoding of the id
    alone, which may hold replacement characters instead of a part of a character. An id that the
    tokenizer does not know has none.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        super().__init__()
        self.at_beginning: Texts = FirstTexts(self)
        """The same of a token that no text stands before."""
        self._detokenizer = detokenizer
        self._machine = detokenizer.start(skip_special_tokens=False)

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = data = self._bytes(token_id)
        return data

    @property
    def pieces(self) -> PieceTable | None:
        """Where tokens may have another text at a beginning."""
        return self._machine.table if isinstance(self._machine, PieceText) else None

    def write(self, machine: TextMachine, token_id: int) -> Written:
        """Push a token, and see where its own text stands."""
        at_beginning, place = machine.at_beginning, machine.pending_chars
        text = machine.push(token_id)
        own = self.at_beginning.text(token_id) if at_beginning else self.text(token_id)
        if text != own:
            before = len(text) - len(own)
            if own and before > place and text.endswith(own):
                place = before
        return Written(text, place, at_beginning)

    def places(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        sent: str | None = None,
    ) -> Places:
        """Of the tokens of a text. `sent`: the text that they were made from, which may spell
        special tokens that are skipped, and lack a space that the tokenizer puts behind those."""
        machine = self._detokenizer.start(skip_special_tokens)
        chars, at_beginning, is_open = 0, 0, True
        """`is_open`: the token before may have left something that the next one brings."""
        offsets = []
        for token_id in token_ids:
            if is_open:
                text, place, first = self.write(machine, token_id)
                at_beginning += first
            else:
                text, place = machine.push(token_id), 0
            is_open = not text or text != self.text(token_id)
            if sent is not None and not sent.startswith(text or self.text(token_id), chars):
                added = text.startswith(" ") and sent.startswith(text[1:], chars)
                if self._detokenizer.is_special(token_id):
                    text = ""  # the tokenizer has put it there
                elif added:
                    text, place = text[1:], max(0, place - 1)
            elif sent is not None and not text and self._detokenizer.is_special(token_id):
                text = self.text(token_id)
            offsets.append(chars + place)
            chars += len(text)
        return Places(offsets, at_beginning)

    def _bytes(self, token_id: int) -> bytes:
        machine, pieces = self._machine, self.pieces
        if isinstance(machine, ByteLevelText):
            return machine.table[token_id]
        if pieces is None:
            return self._detokenizer.decode([token_id], skip_special_tokens=False).encode()
        return _as_bytes(pieces.behind(token_id))


class FirstTexts(Texts):
    """id -> the bytes that the token adds at the beginning of a text."""

    def __init__(self, texts: TokenTexts) -> None:
        super().__init__()
        self._behind = texts

    def __missing__(self, token_id: int) -> bytes:
        pieces = self._behind.pieces
        data = (
            self._behind[token_id] if pieces is None else _as_bytes(pieces.at_beginning(token_id))
        )
        self[token_id] = data
        return data


def _as_bytes(piece: str | int | None) -> bytes:
    return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()
