"""Which slots ask for something that most requests do without."""

from __future__ import annotations

import numpy as np

NO_ROWS = np.zeros(0, dtype=np.int64)


class SlotSet:
    """The slots whose requests ask for one thing: most of the time there are none, which costs a
    step nothing."""

    def __init__(self, max_rows: int) -> None:
        self._slots: set[int] = set()
        # [max_rows]
        self._mask_np = np.zeros(max_rows, dtype=bool)

    def set(self, slot: int, active: bool) -> None:
        """Whether the request that takes the slot active."""
        self._mask_np[slot] = active
        (self._slots.add if active else self._slots.discard)(slot)

    @property
    def any(self) -> bool:
        """Whether there are any."""
        return bool(self._slots)

    def among(self, slots_np: np.ndarray) -> np.ndarray:
        """slots_np [N] -> [M] int64: which of them ask."""
        return np.flatnonzero(self._mask_np[slots_np]) if self._slots else NO_ROWS
