"""Copies of small arrays from the host to a device, without a wait and without allocations."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class PinnedRing:
    """Copies arrays of one type, one after the other, to one tensor of the device. On a CPU the
    tensor shares the array's memory."""

    def __init__(
        self, size: int, dtype: torch.dtype, device: torch.device, places: int = 8
    ) -> None:
        """`size`: the most elements of an array; `places`: how many copies may be queued before one
        waits for the device."""
        self._device, self._next = device, 0
        if device.type == "cpu":
            return
        self._target = torch.empty(size, dtype=dtype, device=device)
        self._places = [torch.empty(size, dtype=dtype).pin_memory() for _ in range(places)]
        self._copied = [torch.cuda.Event() for _ in range(places)]

    def copy(self, array: np.ndarray) -> Tensor:
        """Returns the array on the device, valid for operations that are queued before the next
        copy."""
        if self._device.type == "cpu":
            return torch.from_numpy(array)
        at, self._next = self._next, (self._next + 1) % len(self._places)
        self._copied[at].synchronize()  # returns at once, unless `places` copies are queued
        place, target = self._places[at][: len(array)], self._target[: len(array)]
        place.numpy()[:] = array
        target.copy_(place, non_blocking=True)
        self._copied[at].record()
        return target
