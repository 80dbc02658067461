"""Device tables whose writes are collected on the host and applied together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from swell.kernels.host import to_device


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
        self._first: list[int] = []
        """Where each of the staged values begins in the flat table."""
        self._values: list[np.ndarray] = []

    def stage(self, row: int, start: int, values: Sequence[int | float] | np.ndarray) -> None:
        """Let tensor[row, start : start + len(values)] = values at the next `apply`."""
        rows, width = self.tensor.shape
        assert 0 <= row < rows and start >= 0 and start + len(values) <= width
        self._first.append(row * width + start)
        self._values.append(np.asarray(values, dtype=self._host_type))

    def apply(self) -> None:
        """Write what was staged."""
        if not self._first:
            return
        counts = np.array([len(values) for values in self._values], dtype=np.int64)
        # Place of a value = its index among all values, less that of its row's first, plus `first`.
        shift = np.array(self._first, dtype=np.int64) - counts.cumsum() + counts
        index = np.arange(counts.sum(), dtype=np.int64) + np.repeat(shift, counts)
        values = np.concatenate(self._values)
        self._first.clear()
        self._values.clear()
        device = self.tensor.device
        self.tensor.view(-1)[to_device(index, device)] = to_device(values, device)
