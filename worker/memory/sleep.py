"""Frees a worker's memory while it sleeps."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import torch

from swell.worker.layers.packed_weight import PackedWeight
from swell.worker.memory.host_memory import LockedMemory, trim_heap, warn_of_plain_memory
from swell.worker.model_interfaces import HoldsTensors, moe_layers

_ALONE = threading.Lock()
"""Only one worker of a process frees memory at a time, so that the freed bytes can be measured."""


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


class SleepingWeights:
    """Copies of all tensors of models in host memory. The tensors keep their identity: only their
    storage is empty until `wake`, so views of a storage are views of it again afterwards."""

    @torch.no_grad()
    def __init__(self, *models: HoldsTensors) -> None:
        storages: dict[int, torch.UntypedStorage] = {}
        tensors = (_tensors_of(model) for model in models)
        for tensor in chain.from_iterable(tensors):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                storages.setdefault(storage.data_ptr(), storage)
        self._moe_layers = [layer for model in models for layer in moe_layers(model)]
        self._device = next(iter(storages.values())).device if storages else torch.device("cpu")
        self._kept = [(storage, LockedCopy(storage)) for storage in storages.values()]
        if plain := [copy for _, copy in self._kept if copy.error]:
            nbytes = sum(copy.nbytes for copy in plain)
            warn_of_plain_memory("sleeping weights", nbytes, plain[0].error)
        _synchronize(self._device)
        for storage in storages.values():
            storage.resize_(0)

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes for _, copy in self._kept)

    @torch.no_grad()
    def wake(self) -> None:
        """Fills the tensors again."""
        for storage, copy in self._kept:
            storage.resize_(copy.nbytes)
            copy.restore(storage)
        _synchronize(self._device)
        for layer in self._moe_layers:
            layer.refresh_addresses()
        self._kept.clear()


def freed_by(device: torch.device, call: Callable[[], None]) -> int:
    """Returns how many bytes of memory a call frees in this process. Workers of one process take
    turns."""
    with _ALONE:
        before_bytes = _held_bytes(device)
        call()
        return max(0, before_bytes - _held_bytes(device))


def _held_bytes(device: torch.device) -> int:
    """Returns the bytes of device memory that this process holds; on CPU, its resident memory."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def give_back(device: torch.device) -> None:
    """Returns freed memory of this device to the system. A model may have reference cycles, so this
    runs the garbage collector first."""
    collect_frozen()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim_heap()


def collect_frozen() -> None:
    """Also collects the objects that `freeze_gc` has excluded. If any were excluded, all remaining
    objects, including newer ones, are excluded again."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()


def _tensors_of(model: HoldsTensors) -> Iterator[torch.Tensor]:
    """Yields all tensors of a model. Packed weights and experts that engines may share are not
    parameters, so they are added separately."""
    yield from chain(model.parameters(), model.buffers())
    for module in model.modules():
        if isinstance(module, PackedWeight) and not isinstance(module.weight, torch.Tensor):
            yield module.weight.data
    for layer in moe_layers(model):
        yield from (part.data for weights in layer.local_experts.values() for part in weights)


def _synchronize(device: torch.device) -> None:
    """Waits for all copies on a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
