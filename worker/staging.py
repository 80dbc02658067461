"""Transfers between host and device: staged writes to tables, and copies back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch

from swell.kernels.host import to_device

T = TypeVar("T")


class AsyncCopy(Generic[T]):
    """What is copied to the host, started now and waited for later."""

    def __init__(self, copy: Callable[[], T], stream: torch.cuda.Stream | None) -> None:
        """`copy` starts the copies, on the current stream, and returns them. `stream`: on which
        CUDA copies; None: the tensors lie on the CPU. The caller keeps the tensors until `wait`
        has returned."""
        self._done: torch.cuda.Event | None = None
        if stream is None:
            self._host = copy()
            return
        with torch.cuda.stream(stream):
            self._host = copy()
            self._done = torch.cuda.Event()
            self._done.record(stream)

    def wait(self) -> T:
        """What `copy` returned; it may be read now."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


class StagedTable:
    """A device tensor [rows, width] with staged writes.

    `stage` collects on the host; `apply` writes everything to the device: one piece after the other
    in the memory of the host, else in two copies and one scatter, for any number of rows. An
    element must be staged at most once between two calls of `apply`: a scatter does not define
    which of two writes wins.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        # [rows, width]
        self.tensor = torch.zeros(rows, width, dtype=dtype, device=device)
        self._host_type = np.dtype(str(dtype).removeprefix("torch."))
        # [rows * width], the tensor's own memory; None: it is not the host's
        self._flat_np = self.tensor.numpy().reshape(-1) if device.type == "cpu" else None
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
        if self._flat_np is not None:
            for first, values in zip(self._first, self._values, strict=True):
                self._flat_np[first : first + len(values)] = values
        else:
            self._scatter()
        self._first.clear()
        self._values.clear()

    def _scatter(self) -> None:
        counts = np.array([len(values) for values in self._values], dtype=np.int64)
        # Index of a value in the flat table = its index among all values - that of its row's first
        # value + `first`.
        shift = np.array(self._first, dtype=np.int64) - counts.cumsum() + counts
        index = np.arange(counts.sum(), dtype=np.int64) + np.repeat(shift, counts)
        values = np.concatenate(self._values)
        device = self.tensor.device
        self.tensor.view(-1)[to_device(index, device)] = to_device(values, device)
