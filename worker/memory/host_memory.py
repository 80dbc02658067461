"""Tensors whose memory is allocated when it is written, and memory that is given back."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from swell.configs.runtime.log import StructuredLogger
from swell.configs.runtime.promised_memory import announce

_log = StructuredLogger("worker")

_ALIGNMENT_BYTES = 64
"""A cache line: vector instructions need no more."""


def zeros(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Returns tensors of zeros.

    In host memory they are one range of addresses whose pages the system allocates when they are
    first written. Workers that start later know of the range (see `promised_memory`). Raises
    `MemoryError` if the system refuses the range.
    """
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape in shapes]
    rooms = [-(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for size in sizes]
    if not sum(sizes):
        return [torch.zeros(shape, dtype=dtype) for shape in shapes]
    parts = _map(sum(rooms)).split(rooms)
    return [
        part[:size].view(dtype).view(shape)
        for part, size, shape in zip(parts, sizes, shapes, strict=True)
    ]


def _map(num_bytes: int) -> Tensor:
    """Returns [num_bytes] uint8 in memory of its own, which is given back with the tensor."""
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"the system refuses {num_bytes} bytes of memory ({error}); lower cache.memory_bytes, "
            "cache.memory_fraction or cache.offload_bytes"
        ) from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    try:
        announcement = announce(tensor.data_ptr(), num_bytes)
    except OSError as error:
        _log.warning(
            "workers that start later may take the memory of this cache, too", error=str(error)
        )
    else:
        weakref.finalize(memory, os.close, announcement)
    return tensor


def trim_heap() -> None:
    """Returns freed blocks of this process to the system: glibc keeps those that are not large."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
