"""Copies of a GPU's memory on the host."""

from __future__ import annotations

import torch

from swell.worker.memory.locked_memory import LockedMemory


class LockedCopy:
    """A copy of a storage in locked memory. The copies of this object must be done before it is
    dropped."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        """Begins to copy a storage, which is not empty, on the current stream."""
        self._memory = LockedMemory(storage.nbytes(), storage.device)
        self._host = self._memory.bytes.untyped_storage()
        self._host.copy_(storage, non_blocking=True)

    @property
    def nbytes(self) -> int:
        return self._host.nbytes()

    @property
    def error(self) -> int:
        """CUDA's reason why the memory is not locked; 0: it is, or needs not."""
        return self._memory.error

    def restore(self, storage: torch.UntypedStorage) -> None:
        """Begins to copy it back, into a storage of the same size, on the current stream."""
        storage.copy_(self._host, non_blocking=True)
