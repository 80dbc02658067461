"""Copies of large tensors from the host to a device, for example of weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from swell.worker.memory.host_memory import LockedMemory, warn_of_plain_memory

PART_BYTES = 64 << 20
"""The size of a buffer; a power of two."""
_BUFFERS = 2


class Uploads:
    """Copies tensors one after the other. To a GPU they go by parts through two buffers of locked
    memory: while the device copies one, the host fills the other. Without them the driver would
    copy each tensor twice, one part after the other; it does so if no memory can be locked.

    The end of the `with` block waits for all copies, and gives the buffers back."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._next = device, 0
        self._has_buffers = device.type == "cuda"
        self._buffers: list[LockedMemory | None] = [None] * _BUFFERS
        self._copied = [torch.cuda.Event() for _ in range(_BUFFERS)] if self._has_buffers else []

    def __enter__(self) -> Uploads:
        return self

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies a tensor of the host into one of the same shape on the device, and of any type, on
        the current stream. The source may change afterwards."""
        if not self._has_buffers:
            target.copy_(source)
            return
        for part, source_part in _parts(target, source):
            self._copy_part(part, source_part)

    def upload(self, source: Tensor, device: torch.device) -> Tensor:
        """Returns a tensor of the host on the device; on CPU the tensor itself."""
        if self._device.type == "cpu":
            return source
        target = torch.empty_like(source, device=device)
        self.copy(target, source)
        return target

    def __exit__(self, *_error: object) -> None:
        for event in self._copied:
            event.synchronize()
        self._buffers = [None] * _BUFFERS

    def _copy_part(self, target: Tensor, source: Tensor) -> None:
        at, self._next = self._next, (self._next + 1) % _BUFFERS
        self._copied[at].synchronize()  # returns at once at the first copy
        memory = self._buffer(at, target.nbytes) if self._has_buffers else None
        if memory is None:
            target.copy_(source)
            return
        buffer = memory.bytes[: target.nbytes].view(target.dtype).view(target.shape)
        buffer.copy_(source)
        target.copy_(buffer, non_blocking=True)
        self._copied[at].record()

    def _buffer(self, at: int, nbytes: int) -> LockedMemory | None:
        """Returns a buffer of at least `nbytes`, which no copy uses; None: no memory can be
        locked."""
        kept = self._buffers[at]
        if kept is not None and kept.bytes.nbytes >= nbytes:
            return kept
        self._buffers[at] = kept = None  # gives the smaller one back first
        buffer = LockedMemory(1 << (nbytes - 1).bit_length(), self._device)
        if buffer.error:
            self._has_buffers = False
            warn_of_plain_memory("copies of weights", buffer.bytes.nbytes, buffer.error)
            return None
        self._buffers[at] = buffer
        return buffer


def _parts(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Splits two tensors of one shape into parts of at most `PART_BYTES`, or of one element."""
    if target.nbytes <= PART_BYTES or target.dim() == 0:
        yield target, source
    elif len(target) == 1:
        yield from _parts(target[0], source[0])
    else:
        rows = max(1, PART_BYTES * len(target) // target.nbytes)
        for part, source_part in zip(target.split(rows), source.split(rows), strict=True):
            yield from _parts(part, source_part)
