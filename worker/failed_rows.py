"""Requests that cannot go on, each by its own fault: they end alone."""

from __future__ import annotations

from collections.abc import Sequence

from swell.worker.groups import GroupError

NON_REQUEST_ERRORS = (GroupError, MemoryError)
"""What is no row's own fault, wherever it is raised."""


class FailedRows:
    """Slots whose requests cannot go on, and why.

    A request that fails keeps its slot until the engine has heard of it: its rows are computed
    meanwhile, as those of any other, so that no shape and no collective depends on it.
    """

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}

    def add(self, slot: int, reason: str) -> None:
        """The first reason counts."""
        self._reasons.setdefault(slot, reason)

    def forget(self, slot: int) -> None:
        """Another request takes the slot."""
        if self._reasons:
            self._reasons.pop(slot, None)

    def among(self, slots: Sequence[int]) -> dict[int, str]:
        """Which of these rows have failed, and why."""
        if not self._reasons:
            return {}
        return {row: self._reasons[s] for row, s in enumerate(slots) if s in self._reasons}


def describe(error: Exception) -> str:
    """An exception in one line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
