"""Sets of slots whose requests use a parameter that most requests leave at its default."""

from __future__ import annotations

import numpy as np

NO_ROWS = np.zeros(0, dtype=np.int64)


class SlotSet:
    """The slots whose requests use one parameter. An empty set costs nothing in a step."""

    def __init__(self, max_rows: int) -> None:
        self._slots: set[int] = set()
        # [max_rows]
        self._mask_np = np.zeros(max_rows, dtype=bool)

    def set(self, slot: int, active: bool) -> None:
        """`active`: whether the request that takes the slot uses the parameter."""
        self._mask_np[slot] = active
        (self._slots.add if active else self._slots.discard)(slot)

    @property
    def any(self) -> bool:
        """Whether the set contains any slot."""
        return bool(self._slots)

    def among(self, slots_np: np.ndarray) -> np.ndarray:
        """slots_np [N] -> [M] int64: the indices of the slots that are in the set."""
        return np.flatnonzero(self._mask_np[slots_np]) if self._slots else NO_ROWS
