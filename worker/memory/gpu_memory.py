"""The GPU of a worker, and its memory that a KV cache may take, after everything else that steps
need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from swell.configs.runtime.log import first_line
from swell.worker.memory.sleep import collect_frozen

SPARE = 0.02
"""The part of a worker's memory that stays unused: libraries allocate some memory later than in the
measured steps, and torch cannot use every gap between its tensors."""


CONTEXT_BYTES = 768 * 1024**2
"""An estimate for the CUDA context of a process and its kernels. The memory in use of a GPU shows
it only if no other process uses the GPU."""
GRAPH_BYTES = 2 * 1024**2
"""An estimate for the operations of one captured step, under the same condition. Torch does not
allocate them."""


class MemoryUse(NamedTuple):
    """The memory of a worker before it has a KV cache, in bytes."""

    limit_bytes: int
    """The memory of the GPU that this worker may use."""
    outside_bytes: int
    """Memory that torch has not allocated: groups, the CUDA context, and other processes, unless
    this worker has only a part of the GPU."""
    free_bytes: int
    """Memory that no process has allocated."""
    reserved_bytes: int
    """Memory that torch has allocated for this process: at least the weights."""
    peak_bytes: int
    """The most that torch had allocated during the largest steps, including `reserved_bytes`."""
    graph_bytes: int
    """Memory of all steps that will be captured."""

    @property
    def cache_bytes(self) -> int:
        """The most that the KV cache may take. Torch may use only what is free and what it has
        allocated."""
        limit_bytes = self.limit_bytes - self.outside_bytes
        usable_bytes = min(self.free_bytes + self.reserved_bytes, limit_bytes)
        spare_bytes = int(self.limit_bytes * SPARE)
        return max(0, usable_bytes - self.peak_bytes - self.graph_bytes - spare_bytes)


def estimate_graph_bytes(used_bytes: Sequence[int], captures: int) -> int:
    """Returns the memory of all captures, from the memory in use before and after each of the first
    ones, which are the largest. The first one makes the pool that all of them use; the others add
    only their results and their operations."""
    before, *after = used_bytes
    if not after:
        return 0
    pool_bytes = max(0, after[0] - before)
    if len(after) == 1:
        return pool_bytes * captures
    each_bytes = max(0, after[-1] - after[0]) / (len(after) - 1)
    return pool_bytes + math.ceil(each_bytes * (captures - 1))


def limit_memory(device: torch.device, share: float) -> None:
    """Lets torch allocate at most this part of a GPU for this process, without the CUDA context."""
    if share < 1:
        total = torch.cuda.get_device_properties(device).total_memory
        fraction = max(0.0, share - CONTEXT_BYTES / total)
        torch.cuda.set_per_process_memory_fraction(fraction, device)


class _Captures(NamedTuple):
    """The captures of one model."""

    most: int
    """How many steps may be captured."""
    used_bytes: list[int]
    """The memory in use before and after each of the first ones."""


class GpuMemory:
    """Reads the memory of one GPU."""

    def __init__(self, device: torch.device, share: float) -> None:
        """`share`: the part of the GPU that this process may use; other processes use the rest."""
        self._device, self._share = device, share
        self._is_shared = share < 1

    def measure(self, profile: Callable[[], Iterator[int | None]]) -> MemoryUse:
        """Returns the memory that a profile run shows (see `profile_run.profile`). It is free after
        the run. Raises `ValueError` if the GPU has too little for the largest steps."""
        self.settle()
        torch.cuda.reset_peak_memory_stats(self._device)
        try:
            events = profile()
            models = [_Captures(next(events) or 0, [])]
            torch.cuda.synchronize(self._device)
            peak_bytes = torch.cuda.max_memory_reserved(self._device)
            models[-1].used_bytes.append(self._used_bytes())
            for captures in events:
                if captures is not None:
                    models.append(_Captures(captures, []))
                models[-1].used_bytes.append(self._used_bytes())
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"the largest step does not fit into the memory that the weights leave on "
                f"{self._device}: {first_line(error)}; lower scheduler.max_tokens_per_step or "
                "scheduler.max_rows, or split the model over more workers with parallel.tensor or "
                "parallel.pipeline"
            ) from error
        self.settle()
        free, total = torch.cuda.mem_get_info(self._device)
        reserved_bytes = torch.cuda.memory_reserved(self._device)
        outside_bytes = total - free - reserved_bytes
        graph_bytes = GRAPH_BYTES if self._is_shared else 0
        return MemoryUse(
            limit_bytes=int(total * self._share),
            outside_bytes=CONTEXT_BYTES if self._is_shared else outside_bytes,
            free_bytes=free,
            reserved_bytes=reserved_bytes,
            peak_bytes=peak_bytes,
            graph_bytes=sum(
                estimate_graph_bytes(used, most) + graph_bytes * most for most, used in models
            ),
        )

    def settle(self) -> None:
        """Returns everything to the device that no tensor uses."""
        torch.cuda.synchronize(self._device)
        collect_frozen()
        torch.cuda.empty_cache()

    def _used_bytes(self) -> int:
        """Returns the allocated memory of the GPU, without what torch keeps for later tensors; of a
        shared GPU only what torch has allocated, because others may allocate at the same time."""
        self.settle()
        if self._is_shared:
            return torch.cuda.memory_reserved(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


def device_of(configured: str, gpu: int) -> torch.device:
    """Returns the device of a worker; `auto` is a GPU if there is one. Raises `ValueError` if the
    GPU does not exist."""
    if configured == "cpu" or (configured == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("model.device=cuda, but torch sees no GPU; set model.device=cpu")
    if gpu >= torch.cuda.device_count():
        raise ValueError(
            f"a worker of this machine needs the GPU with index {gpu}, but torch sees "
            f"{torch.cuda.device_count()} GPUs; lower parallel.tensor or parallel.pipeline"
        )
    return torch.device("cuda", gpu)
