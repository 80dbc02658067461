"""Copies of large tensors from the host to a device, for example of weights."""

from __future__ import annotations

import torch
from torch import Tensor

_BUFFERS = 2


class Uploads:
    """Copies tensors one after the other. To a GPU they go through two buffers of pinned memory:
    while the device copies one, the host fills the other. Without them the driver would copy each
    tensor twice, one part after the other."""

    def __init__(self, device: torch.device) -> None:
        self._is_gpu, self._next = device.type == "cuda", 0
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(_BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in range(_BUFFERS)] if self._is_gpu else []

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies a tensor of the host into one of the same shape on the device, and of any type, on
        the current stream. The source may change afterwards."""
        if not self._is_gpu:
            target.copy_(source)
            return
        at, self._next = self._next, (self._next + 1) % _BUFFERS
        self._copied[at].synchronize()  # returns at once at the first copy
        if len(self._buffers[at]) < target.nbytes:
            self._buffers[at] = torch.empty(target.nbytes, dtype=torch.uint8, pin_memory=True)
        buffer = self._buffers[at][: target.nbytes].view(target.dtype).view(target.shape)
        buffer.copy_(source)
        target.copy_(buffer, non_blocking=True)
        self._copied[at].record()

    def finish(self) -> None:
        """Waits until all copies are done."""
        for event in self._copied:
            event.synchronize()
