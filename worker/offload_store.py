"""The memory of KV blocks that have left the device, and the copies between (see
`engine/offload_tiers.py`)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from swell.configs.schema import CacheConfig
from swell.worker.wire import DEVICE, BlockCopy

_Tier = list[Tensor]
"""What a block has, each [blocks, ...]"""


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
        """Carry them out in order."""
        for (source, target), group in groupby(copies, key=_direction):
            # Of several into one block the last one counts; none reads what another one writes.
            places = {copy.target_block: copy.source_block for copy in group}
            if self._on_cuda and DEVICE not in (source, target):
                torch.cuda.current_stream().synchronize()  # the host reads what the device wrote
            for of, to in zip(self._tiers[source], self._tiers[target], strict=True):
                _copy(of, to, places)


def _direction(copy: BlockCopy) -> tuple[int, int]:
    return copy.source_tier, copy.target_tier


def _copy(of: Tensor, to: Tensor, places: dict[int, int]) -> None:
    """to[target] = of[source] for each target -> source"""
    if of.device == to.device:
        targets = torch.tensor(list(places), device=to.device)
        sources = torch.tensor(list(places.values()), device=of.device)
        to.index_copy_(0, targets, of.index_select(0, sources))
        return
    for target, source in places.items():
        to[target].copy_(of[source], non_blocking=True)


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
