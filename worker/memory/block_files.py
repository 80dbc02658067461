"""KV blocks that one engine writes for another one: one file per request and worker.

    swell-kv / NAME.RANK          written by the worker RANK of the engine that computed the prompt
    swell-kv / NAME.RANK.claimed  the engine that continues has seen that all parts exist
                                  (`engine/kv/handover_files.py`); its worker RANK reads the part

A file contains, for each cache of the worker in turn, the worker's part of all blocks. It appears
under its name only when it is complete, and its reader removes it. The next writer removes files
that were not read and are old. Only the owner may access `swell-kv`. It is inside a folder that the
hosts of both engines can access, and perhaps other accounts: what those have created there is
neither written to nor read (`configs/files/private_files.py`).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from swell.configs.files.private_files import create_file, enter_folder, open_file
from swell.configs.runtime.log import StructuredLogger
from swell.configs.schema import CacheConfig
from swell.worker.memory.kv_cache import block_rows
from swell.worker.wire import CLAIMED, HANDOVER_FOLDER, BlockFile

MAX_AGE_S = 120.0
"""The age in seconds above which a file is removed: its request has terminated, or waits for too
long."""
_OURS = re.compile(r"\.?[0-9a-f]{32}\.[0-9]+(\.claimed|\.[0-9]+)?")
_STAGED_BLOCKS = 512
"""The most blocks of one layer that are copied at a time: the GPU needs memory for a second copy of
them."""


class BlockFiles:
    """The block files of one worker."""

    def __init__(
        self,
        caches: Sequence[Tensor],
        config: CacheConfig,
        rank: int,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`caches`: all tensors that hold a part of a block on the device, each [blocks, ...];
        `progress` is called after each copied part."""
        assert config.handover_folder is not None, "cache.handover_folder is set"
        self._caches = caches
        self._folder = Path(config.handover_folder, HANDOVER_FOLDER)
        self._progress = progress
        self._rank = rank
        self._limit_bytes = config.handover_bytes
        self._block_bytes = [cache[:1].numel() * cache.element_size() for cache in caches]
        self._log = StructuredLogger("worker.block_files", rank=rank)

    def write(self, file: BlockFile) -> None:
        """Writes the blocks to a file. If there is no room, or the disk fails, no file appears, and
        the blocks are computed again."""
        size = len(file.block_ids) * sum(self._block_bytes)
        try:
            with enter_folder(self._folder, make=True) as folder:
                if self._remove_old(folder) + size > self._limit_bytes:
                    limit = self._limit_bytes
                    self._log.warning(
                        "no room for block file", name=file.name, bytes=size, limit=limit
                    )
                    return
                name = f"{file.name}.{self._rank}"
                own = f".{name}.{os.getpid()}"
                descriptor = create_file(folder, own)
                try:
                    self._write(descriptor, file.block_ids)
                    os.rename(own, name, src_dir_fd=folder, dst_dir_fd=folder)
                finally:
                    with suppress(FileNotFoundError):
                        os.unlink(own, dir_fd=folder)
        except OSError as error:
            self._log.warning("blocks not written", name=file.name, error=str(error))

    def read(self, file: BlockFile) -> None:
        """Copies the blocks at `file.places` of the file to `file.block_ids`, and removes the file.
        Raises `OSError` if that fails: the engine has seen the file."""
        name = f"{file.name}.{self._rank}{CLAIMED}"
        with enter_folder(self._folder) as folder:
            if file.places and self._caches:
                with open_file(folder, name) as stored:
                    self._read(stored, name, file)
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)

    def _read(self, source: BinaryIO, name: str, file: BlockFile) -> None:
        size, per_block = os.fstat(source.fileno()).st_size, sum(self._block_bytes)
        count, offset = size // per_block, 0
        if size % per_block or max(file.places) >= count:
            raise OSError(
                f"{self._folder / name} has {size} bytes; expected at least "
                f"{max(file.places) + 1} blocks of {per_block}"
            )
        for cache, block_bytes in zip(self._caches, self._block_bytes, strict=True):
            stored = np.memmap(source, np.uint8, "r", offset, (count, block_bytes))
            offset += count * block_bytes
            for places, blocks in _parts(file.places, file.block_ids):
                if cache.is_cuda:
                    staged = torch.from_numpy(stored[places]).to(cache.device)
                    targets = torch.tensor(blocks, device=cache.device)
                    block_rows(cache).index_copy_(0, targets, staged)
                else:  # by one thread: torch's would wait for each other longer than this takes
                    block_rows(cache).numpy()[blocks] = stored[places]
                self._progress()

    def _write(self, descriptor: int, block_ids: Sequence[int]) -> None:
        """Writes the blocks. Raises `OSError` unless all of them are written."""
        with os.fdopen(descriptor, "wb", buffering=0) as out:
            for cache in self._caches:
                rows = block_rows(cache)
                for blocks, _ in _parts(block_ids, block_ids):
                    if cache.is_cuda:
                        places = torch.tensor(blocks, device=cache.device)
                        staged = rows.index_select(0, places).cpu().numpy()
                    else:
                        staged = rows.numpy()[blocks]
                    _write_all(out, staged.data.cast("B"))
                    self._progress()

    def _remove_old(self, folder: int) -> int:
        """Removes old files. Returns the bytes of the other files that belong to workers with this
        rank."""
        oldest_s, size = time.time() - MAX_AGE_S, 0
        with os.scandir(folder) as entries:
            for entry in entries:
                if not _OURS.fullmatch(entry.name):
                    continue
                with suppress(OSError):
                    found = entry.stat(follow_symlinks=False)
                    if found.st_mtime < oldest_s:
                        os.unlink(entry.name, dir_fd=folder)
                    elif entry.name.removesuffix(CLAIMED).endswith(f".{self._rank}"):
                        size += found.st_size
        return size


def _parts(places: Sequence[int], blocks: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields both lists in chunks of `_STAGED_BLOCKS`."""
    for start in range(0, len(places), _STAGED_BLOCKS):
        end = start + _STAGED_BLOCKS
        yield list(places[start:end]), list(blocks[start:end])


def _write_all(out: RawIOBase, data: memoryview) -> None:
    """Writes all of `data` or raises `OSError`; numpy's `tofile` does not guarantee that."""
    while data:
        data = data[out.write(data) :]
