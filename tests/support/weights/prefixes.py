"""Values for the tokens of a row in which each token reads only those before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor


class PrefixValues:
    """Computes a row once, and returns the values of its beginnings without computing them again.
    Longer rows are computed whole, so ask for the longest first."""

    def __init__(self, compute: Callable[[list[int]], Tensor]) -> None:
        """`compute` returns the values [T, ...] of T tokens."""
        self._compute = compute
        self._found: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, tokens: Sequence[int]) -> Tensor:
        row = tuple(tokens)
        for known, values in self._found.items():
            if known[: len(row)] == row:
                return values[: len(row)]
        self._found[row] = self._compute(list(row))
        return self._found[row]
