"""Transfers between host and device: staged writes to tables, and copies back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from swell.kernels.host import to_device


class AsyncCopy:
    """Copies of tensors to the host, started now and waited for later."""

    def __init__(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream | None) -> None:
        """`stream`: on which CUDA copies; None: the tensors lie on the CPU. The caller keeps the
        tensors until `wait` has returned."""
        self._done: torch.cuda.Event | None = None
        if stream is None:
            self._host = list(tensors)
            return
        with torch.cuda.stream(stream):
            self._host = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
            self._done = torch.cuda.Event()
            self._done.record(stream)

    def wait(self) -> list[Tensor]:
        """The tensors on the host."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


class StagedTable:
    """A device tensor [rows, width] with staged writes.

    `stage` collects on the host; `apply` writes everything to the device in two copies and one
    scatter, for any number of rows. An element must be staged at most once between two calls of
    `apply`: a scatter does not define which of two writes wins.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        # [rows, width]
        self.tensor = torch.zeros(rows, width, dtype=dtype, device=device)
        self._host_type = np.dtype(str(dtype).removeprefix("torch."))
        self._first: list[int] = []
        """Where each of the staged values begins in the flat table."""
        self._values: list[np.ndarray] = []

    def stage(self, row: int, start: int, values: Sequence[int | float] | np.ndarray) -> None:
        """Write tensor[row, start : start + len(values)] = values at the next `apply`."""
        rows, width = self.tensor.shape
        assert 0 <= row < rows and start >= 0 and start + len(values) <= width
        self._first.append(row * width + start)
        self._values.append(np.asarray(values, dtype=self._host_type))

    def apply(self) -> None:
        """Write what was staged."""
        if not self._first:
            return
        counts = np.array([len(values) for values in self._values], dtype=np.int64)
        # Index of a value in the flat table = its index among all values - that of its row's first
        # value + `first`.
        shift = np.array(self._first, dtype=np.int64) - counts.cumsum() + counts
        index = np.arange(counts.sum(), dtype=np.int64) + np.repeat(shift, counts)
        values = np.concatenate(self._values)
        self._first.clear()
        self._values.clear()
        device = self.tensor.device
        self.tensor.view(-1)[to_device(index, device)] = to_device(values, device)
