"""What the draft model has guessed behind the tokens of a step, on the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class PendingProposals:
    """One tensor a pass: of the rows of that pass, one token each."""

    def __init__(self, asked: Sequence[int]) -> None:
        """`asked`: rows of the step that were asked for."""
        self._asked = asked
        self._passes: list[tuple[list[int], Tensor]] = []

    def add(self, rows: list[int], tokens: Tensor) -> None:
        """The next token of each of these rows; tokens [rows] int64"""
        self._passes.append((rows, tokens))

    def to_cpu_nonblocking(self) -> PendingProposals:
        """The same on the host."""
        copy = PendingProposals(self._asked)
        for rows, tokens in self._passes:
            copy.add(rows, tokens.to("cpu", non_blocking=True))
        return copy

    def read(self) -> dict[int, list[int]]:
        """Row -> its tokens; of every row that was asked for."""
        found: dict[int, list[int]] = {row: [] for row in self._asked}
        for rows, tokens in self._passes:
            for row, token in zip(rows, tokens.tolist(), strict=True):
                found[row].append(token)
        return found
