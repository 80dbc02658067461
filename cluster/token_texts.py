"""What a token stands for alone: its bytes, and the text that these are."""

from __future__ import annotations

from collections.abc import Sequence

from swell.cluster.detokenizer import ByteLevelText, Detokenizer, PieceText


class TokenTexts(dict[int, bytes]):
    """id -> the bytes that the token adds behind others, filled on use; special tokens too.

    Exact for the tokenizers that `detokenizer` reads; for others it is the decoding of the id
    alone, which may hold replacement characters instead of a part of a character. An id that the
    tokenizer does not know has none.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        super().__init__()
        self._detokenizer = detokenizer
        self._machine = detokenizer.start(skip_special_tokens=False)

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = data = self._bytes(token_id)
        return data

    def text(self, token_id: int) -> str:
        """A part of a character shows as a replacement character."""
        return self[token_id].decode(errors="replace")

    def offsets(self, token_ids: Sequence[int]) -> list[int]:
        """For each token the characters of the decoded text before it; tokens that share a
        character share its place."""
        machine, chars, offsets = self._detokenizer.start(), 0, []
        for token_id in token_ids:
            offsets.append(chars)
            chars += len(machine.push(token_id))
        return offsets

    def _bytes(self, token_id: int) -> bytes:
        machine = self._machine
        if isinstance(machine, ByteLevelText):
            return machine.table[token_id]
        if not isinstance(machine, PieceText):
            return self._detokenizer.decode([token_id], skip_special_tokens=False).encode()
        table = machine.table
        if token_id not in table.rest:
            table.fill(token_id)
        piece = table.rest[token_id]
        return bytes([piece]) if isinstance(piece, int) else (piece or "").encode()
