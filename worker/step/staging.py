"""Transfers between host and device: staged writes to tables, and copies back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
import torch

from swell.kernels.host.device_copy import to_device
from swell.worker.memory import host_memory

T = TypeVar("T")


class AsyncCopy(Generic[T]):
    """A copy to the host that starts now and is waited for later."""

    def __init__(self, copy: Callable[[], T], stream: torch.cuda.Stream | None) -> None:
        """`copy` starts the copies on the current stream and returns their results. `stream`: the
        stream on which CUDA copies; None: the tensors are on the CPU. The caller keeps the tensors
        until `wait` has returned."""
        self._done: torch.cuda.Event | None = None
        if stream is None:
            self._host = copy()
            return
        with torch.cuda.stream(stream):
            self._host = copy()
            self._done = torch.cuda.Event()
            self._done.record(stream)

    def wait(self) -> T:
        """Waits until the result of `copy` can be read, and returns it."""
        if self._done is not None:
            self._done.synchronize()
        return self._host


class StagedTable:
    """A device tensor [rows, width] with staged writes.

    `stage` collects values on the host; `apply` writes all of them to the device. In host memory it
    writes one value range after the other; on other devices it uses two copies and one scatter, for
    any number of rows. An element must be staged at most once between two calls of `apply`: a
    scatter does not define which of two writes wins.
    """

    def __init__(self, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        # [rows, width]
        (self.tensor,) = host_memory.zeros([(rows, width)], dtype, device)
        self._host_type = np.dtype(str(dtype).removeprefix("torch."))
        # [rows * width], a view of the tensor's memory; None: the tensor is not in host memory
        self._flat_np = self.tensor.numpy().reshape(-1) if device.type == "cpu" else None
        self._first: list[int] = []
        """The start of each staged value range in the flat table."""
        self._values: list[np.ndarray] = []

    def stage(self, row: int, start: int, values: Sequence[int | float] | np.ndarray) -> None:
        """Sets tensor[row, start : start + len(values)] = values at the next `apply`."""
        rows, width = self.tensor.shape
        assert 0 <= row < rows and start >= 0 and start + len(values) <= width
        self._first.append(row * width + start)
        self._values.append(np.asarray(values, dtype=self._host_type))

    def apply(self) -> None:
        """Writes what was staged."""
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
        # Index of a value in the flat table = its index among all staged values - the index of the
        # first value of its range + `first`.
        shift = np.array(self._first, dtype=np.int64) - counts.cumsum() + counts
        index = np.arange(counts.sum(), dtype=np.int64) + np.repeat(shift, counts)
        values = np.concatenate(self._values)
        device = self.tensor.device
        self.tensor.view(-1)[to_device(index, device)] = to_device(values, device)
