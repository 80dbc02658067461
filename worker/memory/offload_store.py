"""The memory of KV blocks that are offloaded from the device, and the copies between memory tiers
(see `engine/kv/offload_tiers.py`)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from swell.configs.schema import CacheConfig
from swell.kernels.host.device_copy import to_device
from swell.worker.memory import host_memory
from swell.worker.memory.kv_cache import block_rows
from swell.worker.wire import DEVICE, BlockCopy

_Tier = list[Tensor]
"""All tensors that hold a part of a block, each [blocks, ...]."""
_STAGED_BLOCKS = 512
"""The most blocks of one layer that are copied at a time: the device needs memory for a second copy
of them."""


def count_offload_blocks(cache: CacheConfig, block_bytes: int) -> tuple[int, int]:
    """Returns the number of blocks in host memory, and on disk. `block_bytes`: bytes of one block
    in all layers."""
    if not block_bytes:  # a stage without attention holds any number
        return (cache.offload_bytes, cache.offload_disk_bytes)
    return (cache.offload_bytes // block_bytes, cache.offload_disk_bytes // block_bytes)


class OffloadStore:
    """The memory tiers of one worker."""

    def __init__(
        self, caches: Sequence[Tensor], blocks: tuple[int, int], folder: str | None
    ) -> None:
        """`caches`: all tensors that hold a part of a block on the device, of one type, each
        [blocks, ...]; `blocks`: the number of blocks in host memory, and in a file in `folder`
        (None: the system's folder for temporary files). The file is unlinked at once, so it
        disappears with the process. Raises `OSError`."""
        in_memory, on_disk = blocks
        self._tiers: list[_Tier] = [[*caches], [], []]
        self._on_cuda = bool(caches) and caches[0].is_cuda
        if in_memory and caches:
            pages = partial(_host_memory, dtype=caches[0].dtype, pinned=self._on_cuda)
            self._tiers[1] = _allocate(caches, in_memory, pages)
        if on_disk and caches:
            file = partial(_map_file, dtype=caches[0].dtype, folder=folder)
            self._tiers[2] = _allocate(caches, on_disk, file)

    def apply(self, copies: Sequence[BlockCopy]) -> None:
        """Executes the copies with the same result as one after the other."""
        for batch in batches_of(copies):
            (source, target), places = batch.tiers, batch.places
            of, to = self._tiers[source], self._tiers[target]
            if not self._on_cuda:
                _copy_on_host(of, to, places)
            elif target == DEVICE:
                _load(of, to, [(host, device) for device, host in places.items()])
            elif source == DEVICE:
                _save(of, to, [*places.items()])
            else:
                torch.cuda.current_stream().synchronize()  # the host reads what the device wrote
                _copy_on_host(of, to, places)


@dataclass(slots=True)
class Batch:
    """Copies from one tier to another. If several copy to the same block, the last one counts; no
    copy reads what another one writes."""

    tiers: tuple[int, int]
    """The source tier and the target tier."""
    places: dict[int, int] = field(default_factory=dict)
    """Target block -> source block."""
    sources: set[int] = field(default_factory=set)

    def add(self, copy: BlockCopy) -> None:
        self.places[copy.target_block] = copy.source_block
        self.sources.add(copy.source_block)

    def precedes(self, copy: BlockCopy) -> bool:
        """Whether the copy must come after this batch: a copy of the batch writes a block that it
        reads or writes, or reads a block that it writes."""
        source, target = self.tiers
        reads = source == copy.target_tier and copy.target_block in self.sources
        feeds = target == copy.source_tier and copy.source_block in self.places
        return reads or feeds or (target == copy.target_tier and copy.target_block in self.places)


def batches_of(copies: Sequence[BlockCopy]) -> list[Batch]:
    """Groups copies into few batches with the same result as copying in order. When blocks enter a
    full tier, each one follows a block that leaves the tier, and all that leave can be copied
    first."""
    batches: list[Batch] = []
    for copy in copies:
        tiers = (copy.source_tier, copy.target_tier)
        found = None
        for batch in reversed(batches):
            if batch.tiers == tiers:
                found = batch
                break
            if batch.precedes(copy):
                break
        if found is None:
            found = Batch(tiers)
            batches.append(found)
        found.add(copy)
    return batches


def _copy_on_host(of: _Tier, to: _Tier, places: dict[int, int]) -> None:
    """Sets to[target] = of[source] for each target -> source, all in host memory. Uses one thread:
    torch's threads would wait for each other longer than this takes."""
    targets, sources = np.array(list(places)), np.array(list(places.values()))
    for source, target in zip(of, to, strict=True):
        block_rows(target).numpy()[targets] = block_rows(source).numpy()[sources]


def _save(of: _Tier, to: _Tier, pairs: list[tuple[int, int]]) -> None:
    """Sets to[host] = of[device] for pairs (host, device): gathered on the device."""
    for runs, places in _staged(pairs, of):
        for source, target in zip(of, to, strict=True):
            staged = source.index_select(0, places)
            for host, first, last in runs:
                target[host : host + last - first].copy_(staged[first:last], non_blocking=True)


def _load(of: _Tier, to: _Tier, pairs: list[tuple[int, int]]) -> None:
    """Sets to[device] = of[host] for pairs (host, device): scattered on the device."""
    for runs, places in _staged(pairs, to):
        for source, target in zip(of, to, strict=True):
            staged = target.new_empty(len(places), *target.shape[1:])
            for host, first, last in runs:
                staged[first:last].copy_(source[host : host + last - first], non_blocking=True)
            target.index_copy_(0, places, staged)


def _staged(
    pairs: list[tuple[int, int]], on_device: _Tier
) -> Iterator[tuple[list[tuple[int, int, int]], Tensor]]:
    """Yields the pairs (host, device) in chunks, in the order of the host's blocks, so that few
    blocks are staged at once. Each chunk has its runs (see `runs_of`) and its blocks on the
    device."""
    pairs.sort()
    for begin in range(0, len(pairs), _STAGED_BLOCKS):
        hosts, devices = np.array(pairs[begin : begin + _STAGED_BLOCKS], dtype=np.int64).T
        yield runs_of(hosts.tolist()), to_device(devices.copy(), on_device[0].device)


def runs_of(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Groups consecutive blocks, which can be copied at once, into runs: the first block of each
    run, and the start and end of the run in `blocks`."""
    ends = [i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1] + 1]
    return [(blocks[i], i, j) for i, j in pairwise([0, *ends, len(blocks)])]


def _allocate(caches: Sequence[Tensor], blocks: int, allocate: Callable[[int], Tensor]) -> _Tier:
    """Allocates tensors like `caches` for this many blocks, in one piece of memory. `allocate`
    returns a flat tensor with the given number of elements."""
    shapes = [(blocks, *cache.shape[1:]) for cache in caches]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = allocate(sum(sizes)).split(sizes)
    return [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]


def _host_memory(size: int, dtype: torch.dtype, pinned: bool) -> Tensor:
    """Returns a tensor [size]. A device copies from pinned memory, which is allocated at once."""
    if pinned:
        return torch.empty(size, dtype=dtype, pin_memory=True)
    return host_memory.zeros([(size,)], dtype, torch.device("cpu"))[0]


def _map_file(size: int, dtype: torch.dtype, folder: str | None) -> Tensor:
    """Returns a tensor [size] in a file whose disk space is reserved now: a disk that is full later
    would kill the process. Raises `OSError`."""
    descriptor, path = tempfile.mkstemp(prefix="swell-kv-", dir=folder)
    try:
        os.posix_fallocate(descriptor, 0, size * dtype.itemsize)
        return torch.from_file(path, shared=True, size=size, dtype=dtype)
    finally:
        os.close(descriptor)
        os.unlink(path)
