"""Memory of the host that a GPU reads and writes by itself."""

from __future__ import annotations

import mmap
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch

from swell.configs.runtime.log import StructuredLogger


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
