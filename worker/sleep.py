"""How a worker gives memory back while it sleeps."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import nn

from swell.worker.cache_size import moe_layers

_ALONE = threading.Lock()
"""One worker of a process gives memory back at a time, so that it knows how much."""


class SleepingWeights:
    """Copies of all tensors of models in the memory of the host. The tensors stay what they are:
    their storage is empty until `wake`, so whatever is a part of one is a part of it again."""

    @torch.no_grad()
    def __init__(self, *models: nn.Module) -> None:
        storages: dict[int, torch.UntypedStorage] = {}
        tensors = (_tensors_of(model) for model in models)
        for tensor in chain.from_iterable(tensors):
            storage = tensor.untyped_storage()
            if storage.nbytes():
                storages.setdefault(storage.data_ptr(), storage)
        self._kept: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        for storage in storages.values():
            self._kept.append((storage, _copy_of(storage)))
            storage.resize_(0)

    @property
    def nbytes(self) -> int:
        return sum(copy.nbytes() for _, copy in self._kept)

    @torch.no_grad()
    def wake(self) -> None:
        """Fill the tensors again."""
        for storage, copy in self._kept:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self._kept.clear()


def freed_by(device: torch.device, call: Callable[[], None]) -> int:
    """Bytes that this process has less after a call. Its workers make such calls one by one."""
    with _ALONE:
        before_bytes = _held_bytes(device)
        call()
        return max(0, before_bytes - _held_bytes(device))


def _held_bytes(device: torch.device) -> int:
    """Memory that this process has of the device; on CPU what is resident."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def give_back(device: torch.device) -> None:
    """Let others have what was freed on this device. A model may have cycles."""
    collect_frozen()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc keeps small blocks otherwise
    if trim is not None:
        trim(0)


def collect_frozen() -> None:
    """Collect also what `freeze_gc` has excluded. What is left then, and what has come since, is
    excluded again, if anything was."""
    is_frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if is_frozen:
        gc.freeze()


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Experts that engines may share are no parameters, and packed ones no tensors."""
    yield from chain(model.parameters(), model.buffers())
    for layer in moe_layers(model):
        yield from (part.data for weights in layer.local_experts.values() for part in weights)


def _copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copy = torch.UntypedStorage(storage.nbytes(), device="cpu")
    copy.copy_(storage)
    return copy
