"""Requests that fail by their own fault: only these fail, and the others continue."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from swell.configs.runtime.log import first_line
from swell.worker.comm.groups import GroupError

NON_REQUEST_ERRORS = (
    GroupError,
    MemoryError,
    torch.OutOfMemoryError,
    torch.AcceleratorError,
)
"""Errors that are never the fault of one request."""


class FailedRows:
    """Slots whose requests have failed, and why.

    A failed request keeps its slot until the engine has processed the failure. Until then its rows
    are computed like any other, so that no shape and no collective depends on the failure.
    """

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        self._invalid: set[int] = set()

    def add(self, slot: int, reason: str, *, is_invalid: bool = False) -> None:
        """Records a failure; the first reason of a slot is kept. `is_invalid`: the request itself
        is invalid."""
        if is_invalid and slot not in self._reasons:
            self._invalid.add(slot)
        self._reasons.setdefault(slot, reason)

    def forget(self, slot: int) -> None:
        """Forgets a slot's failure, because a new request takes the slot."""
        if self._reasons:
            self._reasons.pop(slot, None)
            self._invalid.discard(slot)

    def among(self, slots: Sequence[int]) -> dict[int, str]:
        """Returns row -> reason, for the failed rows among those at `slots`."""
        if not self._reasons:
            return {}
        return {row: self._reasons[s] for row, s in enumerate(slots) if s in self._reasons}

    def invalid_among(self, slots: Sequence[int]) -> list[int]:
        """Returns the failed rows at `slots` whose requests are invalid."""
        if not self._invalid:
            return []
        return [row for row, slot in enumerate(slots) if slot in self._invalid]


def describe(error: Exception) -> str:
    """Formats an exception as one line."""
    name, text = type(error).__name__, first_line(error)
    return name if text == name else f"{name}: {text}"
