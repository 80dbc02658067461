"""A GPU whose copies are done late, on a CPU: those that the host does not wait for are only
queued, until an event or the device is waited for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from mmap import PAGESIZE
from typing import Any

import pytest
import torch
from torch import Tensor

_ALREADY_LOCKED = 712
"""`cudaErrorHostMemoryAlreadyRegistered`"""


class LateGpu:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._queue: deque[tuple[Callable[[], object], int]] = deque()
        """Copies, each with the address of its source."""
        self._done = 0
        """How many copies have been done."""
        self.num_queued = 0
        self.locked: dict[int, int] = {}
        """Address -> bytes of memory of the host whose pages are locked."""
        self.locked_bytes = 0
        """The most bytes whose pages were locked at one time."""
        self.is_freed_early = False
        """Whether memory was unlocked that a queued copy reads."""
        self.lock_error = 0
        """The result of `cudaHostRegister`."""
        self._thread = threading.local()
        """The current device of a thread, and the error of the last call that failed there."""
        self._thread.device = 1
        tensor_copy, storage_copy = Tensor.copy_, torch.UntypedStorage.copy_

        def copy(real: Callable[..., Any]) -> Callable[..., Any]:
            def late(target: Any, source: Any, non_blocking: bool = False) -> Any:
                if not non_blocking:
                    return real(target, source)
                self.num_queued += 1
                self._queue.append((lambda: real(target, source), source.data_ptr()))
                return target

            return late

        monkeypatch.setattr(Tensor, "copy_", copy(tensor_copy))
        monkeypatch.setattr(torch.UntypedStorage, "copy_", copy(storage_copy))
        monkeypatch.setattr(torch.cuda, "Event", lambda: LateEvent(self))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: self.finish(self.num_queued))
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self._thread.device)
        monkeypatch.setattr(torch.cuda, "set_device", self._set_device)

    def finish(self, count: int) -> None:
        """Does the first `count` of all copies."""
        while self._done < count:
            self._queue.popleft()[0]()
            self._done += 1

    def _set_device(self, device: int) -> None:
        self._thread.device = device

    def launch(self) -> None:
        """Launches a kernel. This raises the error of an earlier call on this thread, like torch's
        check of each launch."""
        error, self._thread.error = getattr(self._thread, "error", 0), 0
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert getattr(self._thread, "device", 0) == 1, "a context on another GPU"
        pages = _pages(address, size)
        is_locked = any(pages & _pages(*other) for other in self.locked.items())
        if error := _ALREADY_LOCKED if is_locked else self.lock_error:
            self._thread.error = error
            return error
        self.locked[address] = size
        self.locked_bytes = max(self.locked_bytes, sum(self.locked.values()))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        places = range(address, address + self.locked.pop(address))
        self.is_freed_early |= any(at in places for _, at in self._queue)
        return 0


def _pages(address: int, size: int) -> set[int]:
    return set(range(address // PAGESIZE, (address + size - 1) // PAGESIZE + 1))


class LateEvent:
    def __init__(self, gpu: LateGpu) -> None:
        self._gpu, self._count = gpu, 0

    def record(self) -> None:
        self._count = self._gpu.num_queued

    def synchronize(self) -> None:
        self._gpu.finish(self._count)


@pytest.fixture
def late_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateGpu]:
    gpu = LateGpu(monkeypatch)
    yield gpu
    assert not gpu.is_freed_early
