"""Device tables whose writes are collected on the host and applied together, and the one way by
which host arrays reach the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor of the device, without a wait.

    On CPU it shares the array's memory. On CUDA it passes through pinned memory, which torch's
    host allocator does not hand out again before the copy is done.
    """
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class StagedTable:
    """A device tensor [rows, width] with staged writes.

    `stage` collects on the host; `apply` brings everything to the device in two copies and one
    scatter, however many rows it touches. Between two of them an element is staged once at most: a
    scatter leaves open which of two writes wins.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        # [rows, width]
        self.tensor = torch.zeros(rows, width, dtype=dtype, device=device)
        self._host_type = np.dtype(str(dtype).removeprefix("torch."))
        self._index: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def stage(self, row: int, start: int, values: Sequence[int | float] | np.ndarray) -> None:
        """Let tensor[row, start : start + len(values)] = values at the next `apply`."""
        rows, width = self.tensor.shape
        assert 0 <= row < rows and start >= 0 and start + len(values) <= width
        first = row * width + start
        self._index.append(np.arange(first, first + len(values), dtype=np.int64))
        self._values.append(np.asarray(values, dtype=self._host_type))

    def apply(self) -> None:
        """Write what was staged."""
        if not self._index:
            return
        index, values = np.concatenate(self._index), np.concatenate(self._values)
        self._index.clear()
        self._values.clear()
        device = self.tensor.device
        self.tensor.view(-1)[to_device(index, device)] = to_device(values, device)
