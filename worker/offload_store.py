"""The memory of KV blocks that have left the device, and the copies between (see
`engine/offload_tiers.py`)."""

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
from swell.kernels.host import to_device
from swell.worker.kv_cache import block_rows
from swell.worker.wire import DEVICE, BlockCopy

_Tier = list[Tensor]
"""What a block has, each [blocks, ...]"""
_STAGED_BLOCKS = 512
"""As many at once are on the device twice, of one layer."""


def count_offload_blocks(cache: CacheConfig, block_bytes: int) -> tuple[int, int]:
    """Blocks in host memory, and on disk. `block_bytes`: of one block in all layers."""
    if not block_bytes:  # a stage without attention holds any number
        return (cache.offload_bytes, cache.offload_disk_bytes)
    return (cache.offload_bytes // block_bytes, cache.offload_disk_bytes // block_bytes)


class OffloadStore:
    """The tiers of one worker."""

    def __init__(
        self, caches: Sequence[Tensor], blocks: tuple[int, int], folder: str | None
    ) -> None:
        """`caches`: all that a block has on the device, of one type, each [blocks, ...]; `blocks`:
        in host memory, and in a file in `folder` (None: where the system has temporary files). The
        file has no name, so it goes with the process. Raises OSError."""
        in_memory, on_disk = blocks
        self._tiers: list[_Tier] = [[*caches], [], []]
        self._on_cuda = bool(caches) and caches[0].is_cuda
        if in_memory and caches:
            pages = partial(torch.empty, dtype=caches[0].dtype, pin_memory=self._on_cuda)
            self._tiers[1] = _allocate(caches, in_memory, pages)
        if on_disk and caches:
            file = partial(_map_file, dtype=caches[0].dtype, folder=folder)
            self._tiers[2] = _allocate(caches, on_disk, file)

    def apply(self, copies: Sequence[BlockCopy]) -> None:
        """Carry them out as if in order."""
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
    """Copies from one tier to another. Of several into one block the last one counts; none reads
    what another one writes."""

    tiers: tuple[int, int]
    """Source and target."""
    places: dict[int, int] = field(default_factory=dict)
    """Target -> source."""
    sources: set[int] = field(default_factory=set)

    def add(self, copy: BlockCopy) -> None:
        self.places[copy.target_block] = copy.source_block
        self.sources.add(copy.source_block)

    def precedes(self, copy: BlockCopy) -> bool:
        """Whether the copy must come behind these: one of them writes what it reads or writes, or
        reads what it writes."""
        source, target = self.tiers
        reads = source == copy.target_tier and copy.target_block in self.sources
        feeds = target == copy.source_tier and copy.source_block in self.places
        return reads or feeds or (target == copy.target_tier and copy.target_block in self.places)


def batches_of(copies: Sequence[BlockCopy]) -> list[Batch]:
    """Few batches with the result of the copies in their order. A full tier gets each block behind
    one that leaves it, and all that leave may go first."""
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
    """to[target] = of[source] for each target -> source; all in the memory of the host. By one
    thread: torch's would wait for each other longer than this takes."""
    targets, sources = np.array(list(places)), np.array(list(places.values()))
    for source, target in zip(of, to, strict=True):
        block_rows(target).numpy()[targets] = block_rows(source).numpy()[sources]


def _save(of: _Tier, to: _Tier, pairs: list[tuple[int, int]]) -> None:
    """to[host] = of[device] for pairs (host, device): gathered on the device."""
    for runs, places in _staged(pairs, of):
        for source, target in zip(of, to, strict=True):
            staged = source.index_select(0, places)
            for host, first, last in runs:
                target[host : host + last - first].copy_(staged[first:last], non_blocking=True)


def _load(of: _Tier, to: _Tier, pairs: list[tuple[int, int]]) -> None:
    """to[device] = of[host] for pairs (host, device): scattered on the device."""
    for runs, places in _staged(pairs, to):
        for source, target in zip(of, to, strict=True):
            staged = target.new_empty(len(places), *target.shape[1:])
            for host, first, last in runs:
                staged[first:last].copy_(source[host : host + last - first], non_blocking=True)
            target.index_copy_(0, places, staged)


def _staged(
    pairs: list[tuple[int, int]], on_device: _Tier
) -> Iterator[tuple[list[tuple[int, int, int]], Tensor]]:
    """Parts of the pairs (host, device) in the order of the host's blocks, of which few are staged
    at once. Of each part its runs, and its blocks on the device: see `runs_of`."""
    pairs.sort()
    for begin in range(0, len(pairs), _STAGED_BLOCKS):
        hosts, devices = np.array(pairs[begin : begin + _STAGED_BLOCKS], dtype=np.int64).T
        yield runs_of(hosts.tolist()), to_device(devices.copy(), on_device[0].device)


def runs_of(blocks: Sequence[int]) -> list[tuple[int, int, int]]:
    """Blocks that follow each other are one copy, however many they are: the first block of each
    run, and where it begins and ends among all."""
    ends = [i for i in range(1, len(blocks)) if blocks[i] != blocks[i - 1] + 1]
    return [(blocks[i], i, j) for i, j in pairwise([0, *ends, len(blocks)])]


def _allocate(caches: Sequence[Tensor], blocks: int, allocate: Callable[[int], Tensor]) -> _Tier:
    """The same for so many blocks, in one piece of memory. `allocate` gives so many numbers."""
    shapes = [(blocks, *cache.shape[1:]) for cache in caches]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = allocate(sum(sizes)).split(sizes)
    return [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]


def _map_file(size: int, dtype: torch.dtype, folder: str | None) -> Tensor:
    """[size], in a file whose room is taken now: a disk that is full later would end the process.
    Raises OSError."""
    descriptor, path = tempfile.mkstemp(prefix="swell-kv-", dir=folder)
    try:
        os.posix_fallocate(descriptor, 0, size * dtype.itemsize)
        return torch.from_file(path, shared=True, size=size, dtype=dtype)
    finally:
        os.close(descriptor)
        os.unlink(path)
