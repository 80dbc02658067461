"""The tokens that the draft model proposes after a step, on the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class PendingProposals:
    """The proposals of each pass of the draft model: one tensor per pass, with one token for each
    row of that pass."""

    def __init__(self, asked: Sequence[int]) -> None:
        """`asked`: the rows of the step for which the plan requests proposals."""
        self._asked = asked
        self._passes: list[tuple[list[int], Tensor]] = []

    def add(self, rows: list[int], tokens: Tensor) -> None:
        """Adds the next token of each of these rows; tokens [rows] int64"""
        self._passes.append((rows, tokens))

    def to_cpu_nonblocking(self) -> PendingProposals:
        """Returns a copy on the host."""
        copy = PendingProposals(self._asked)
        for rows, tokens in self._passes:
            copy.add(rows, tokens.to("cpu", non_blocking=True))
        return copy

    def read(self) -> dict[int, list[int]]:
        """Returns row -> its tokens, for every row for which proposals were requested."""
        found: dict[int, list[int]] = {row: [] for row in self._asked}
        for rows, tokens in self._passes:
            for row, token in zip(rows, tokens.tolist(), strict=True):
                found[row].append(token)
        return found
