"""Memory of the host: tensors whose memory is allocated when it is written, memory that a GPU reads
and writes by itself, and memory that is given back."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

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


class LockedMemory:
    """Pages that the system keeps in memory as long as this object exists; on a CPU, and if the
    system allows no more locked pages, plain memory. Torch's pinned memory would have a power of
    two as its size, and would not be given back to the system. All copies from and to it must be
    done before this object is dropped."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """`nbytes`: at least one; `device`: the device that reads and writes the memory."""
        # Each block has its own pages: CUDA does not lock a page twice.
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = torch.frombuffer(pages, dtype=torch.uint8)  # [nbytes]
        self.error = 0
        """CUDA's reason why the pages are not locked."""
        if device.type == "cuda":
            self._lock()

    def _lock(self) -> None:
        runtime, address = torch.cuda.cudart(), self.bytes.data_ptr()
        device = torch.cuda.current_device()

        def register() -> int:
            torch.cuda.set_device(device)  # a new thread would use the first GPU
            return int(runtime.cudaHostRegister(address, self.bytes.nbytes, 0))

        # CUDA keeps the error of a call for the thread, and the next launch there would raise it.
        with ThreadPoolExecutor(1) as thread:
            self.error = thread.submit(register).result()
        if not self.error:
            weakref.finalize(self, runtime.cudaHostUnregister, address)


def warn_of_plain_memory(use: str, nbytes: int, error: int) -> None:
    """Logs that memory could not be locked."""
    StructuredLogger("worker").warning(
        f"memory of the host for {use} could not be locked, so that copies take longer: raise the "
        "limit of locked memory (ulimit -l, or that of the container), or free memory of the host",
        nbytes=nbytes,
        cuda_error=error,
    )
