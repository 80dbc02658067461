"""Copies of a GPU's memory on the host, in memory that the GPU reads and writes by itself."""

from __future__ import annotations

import weakref

import torch

from swell.configs.runtime.log import StructuredLogger


class LockedCopy:
    """A copy of a storage, in pages that the system keeps in memory. Torch's pinned memory would
    have a power of two as its size, and would not be given back to the system. The copies of this
    object must be done before it is dropped."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        """Begins to copy a storage on the current stream."""
        self._host = torch.UntypedStorage(storage.nbytes(), device="cpu")
        if storage.device.type == "cuda":
            self._lock()
        self._host.copy_(storage, non_blocking=True)

    @property
    def nbytes(self) -> int:
        return self._host.nbytes()

    def restore(self, storage: torch.UntypedStorage) -> None:
        """Begins to copy it back, into a storage of the same size, on the current stream."""
        storage.copy_(self._host, non_blocking=True)

    def _lock(self) -> None:
        """Locks the pages as long as this object exists. Copies are only slower if the system
        allows no more locked pages."""
        runtime, address = torch.cuda.cudart(), self._host.data_ptr()
        error = int(runtime.cudaHostRegister(address, self.nbytes, 0))
        if error:
            StructuredLogger("worker").warning(
                "memory of sleeping weights could not be locked: to sleep and to wake takes longer",
                nbytes=self.nbytes,
                cuda_error=error,
            )
            return
        weakref.finalize(self, runtime.cudaHostUnregister, address)
