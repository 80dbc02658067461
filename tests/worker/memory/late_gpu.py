"""A GPU whose copies are done late, on a CPU: those that the host does not wait for are only
queued, until an event or the device is waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor


class LateGpu:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._queue: deque[Callable[[], object]] = deque()
        self._done = 0
        """How many copies have been done."""
        self.num_queued = 0
        self.locked: dict[int, int] = {}
        """Address -> bytes of memory of the host whose pages are locked."""
        self.lock_error = 0
        """The result of `cudaHostRegister`."""
        tensor_copy, storage_copy = Tensor.copy_, torch.UntypedStorage.copy_
        empty = torch.empty

        def copy(real: Callable[..., Any]) -> Callable[..., Any]:
            def late(target: Any, source: Any, non_blocking: bool = False) -> Any:
                if not non_blocking:
                    return real(target, source)
                self.num_queued += 1
                self._queue.append(lambda: real(target, source))
                return target

            return late

        def pinned(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            return empty(*args, **options)

        monkeypatch.setattr(Tensor, "copy_", copy(tensor_copy))
        monkeypatch.setattr(torch.UntypedStorage, "copy_", copy(storage_copy))
        monkeypatch.setattr(torch, "empty", pinned)
        monkeypatch.setattr(torch.cuda, "Event", lambda: LateEvent(self))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: self.finish(self.num_queued))
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)

    def finish(self, count: int) -> None:
        """Does the first `count` of all copies."""
        while self._done < count:
            self._queue.popleft()()
            self._done += 1

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.lock_error:
            self.locked[address] = size
        return self.lock_error

    def cudaHostUnregister(self, address: int) -> int:
        assert not self._queue, "copies from memory that is not locked any more"
        del self.locked[address]
        return 0


class LateEvent:
    def __init__(self, gpu: LateGpu) -> None:
        self._gpu, self._count = gpu, 0

    def record(self) -> None:
        self._count = self._gpu.num_queued

    def synchronize(self) -> None:
        self._gpu.finish(self._count)


@pytest.fixture
def late_gpu(monkeypatch: pytest.MonkeyPatch) -> LateGpu:
    return LateGpu(monkeypatch)
