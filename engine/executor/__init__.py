"""The interface between an engine and its workers."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from swell.configs.runtime.nccl import check_nccl
from swell.configs.schema import Config, ConfigError
from swell.coordinator.wire import WorkerReport, WorkerStatus
from swell.worker.wire import (
    AdapterLoaded,
    AsyncModelRunnerOutput,
    CacheProgress,
    CaptureProgress,
    CompileProgress,
    GroupPlan,
    LoadAdapter,
    Regrouped,
    SchedulerOutput,
    StartMessage,
    WorkerLimits,
    WorkerProgress,
)

EXECUTORS = {
    "inline": "swell.engine.executor.inline:InlineExecutor",
    "inproc": "swell.engine.executor.inproc:InprocExecutor",
    "ray": "swell.engine.executor.ray:RayExecutor",
}


class ExecutorError(RuntimeError):
    """A worker failed or was lost, and the engine cannot continue."""


class GroupBroken(ExecutorError):
    """The workers are alive, but one of their groups has failed: `regroup` forms it again."""

    def __init__(self, message: str, absent: Iterable[int] = ()) -> None:
        """`absent`: engines that did not join a group across engines, or cannot be reached, by
        their indices in its plan."""
        super().__init__(message)
        self.absent = tuple(absent)


class WorkerLost(ExecutorError):
    """Workers died or stopped: `repair` replaces them. The message names the ranks."""


class ExecutorLimits(msgspec.Struct, frozen=True):
    """Limits that all workers of the engine can meet."""

    num_blocks: int
    max_model_len: int
    vocab_size: int
    samples: bool = True
    """See `WorkerLimits`; the same holds for `keeps_kv`."""
    keeps_kv: bool = True
    offload_blocks: tuple[int, int] = (0, 0)
    numerics: str = ""
    """The numerics class of the engine: those of its workers, in the order of their ranks, without
    repetitions."""

    @property
    def of_cache(self) -> tuple[int, int, tuple[int, int]]:
        """The arguments of `Worker.init_cache`, and the fields of `InitCache`."""
        return self.num_blocks, self.max_model_len, self.offload_blocks


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker as operators see it."""

    rank: int
    tensor: int
    pipeline: int
    pid: int
    """0: unknown, because its process is starting."""
    status: WorkerStatus = WorkerStatus.READY
    replaced: int = 0
    """See `WorkerReport`."""

    @property
    def report(self) -> WorkerReport:
        return WorkerReport(self.status, self.pid, self.replaced)


Progress = Callable[[str], None]
"""Called with a short text that says what the start is doing: the name of a phase, and details
after a comma."""
LOADING_LIBRARIES = "loading libraries"
ALLOCATING_CACHE = "allocating the KV cache"
_LOADING_WEIGHTS = "loading weights"


def phase_text(message: StartMessage) -> str:
    """Returns the name of the phase that a worker is in, and its share after a comma."""
    match message:
        case CompileProgress(_, done, total):
            return f"compiling kernels, {done} of {total} files"
        case WorkerProgress(_, _, 0):
            return _LOADING_WEIGHTS
        case WorkerProgress(_, done, total, tensor, tensors):
            share = f"{done / total:.0%} of {total / 1e9:.1f} GB"
            return f"{_LOADING_WEIGHTS}, tensor {tensor} of {tensors}, {share}"
        case CacheProgress(_, done, total):
            return f"{ALLOCATING_CACHE}, {done} of {total} blocks"
        case CaptureProgress(_, done, total):
            return f"capturing steps, {done} of {total}"


class Executor(ABC):
    """The workers of one engine: started once; they execute plans and return results in order.

    Waiting for a result may raise GroupBroken or WorkerLost; any other ExecutorError stops the
    engine.
    """

    @abstractmethod
    def start(self, progress: Progress = lambda text: None) -> ExecutorLimits:
        """Loads the model, forms the engine's own groups, measures the memory that is left, and
        allocates the KV cache. Every worker finishes each of these phases before the next one
        begins. Raises the exception of a worker."""

    @abstractmethod
    def execute(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        """Sends a plan to every worker; `overlaps` says whether this returns immediately."""

    @abstractmethod
    def regroup(self, groups: GroupPlan) -> list[Regrouped]:
        """Lets every worker leave its groups and form those of the plan; returns a result for each
        worker.

        The executor fills in `generation` and `store`; the caller sets the rest. Blocks until all
        groups are formed. Unread results of earlier steps are dropped. Raises GroupBroken if a peer
        does not join, WorkerLost if a worker of this engine is lost.
        """

    @abstractmethod
    def abort(self) -> None:
        """Lets workers inside a collective leave it with an error; may be called from any
        thread."""

    def repair(self) -> None:
        """Replaces the lost workers; the others keep their weights. `regroup` must follow, and the
        KV cache is empty. Raises ExecutorError if it fails."""
        raise ExecutorError("this executor cannot replace a worker")

    def load_adapter(self, command: LoadAdapter) -> None:
        """Lets every worker load an adapter, in parallel with the following steps."""
        raise ExecutorError("this executor cannot load adapters")

    def loaded_adapters(self, wait_s: float) -> list[AdapterLoaded]:
        """Waits up to `wait_s` and returns adapters that all workers have loaded, or that a worker
        cannot load, each once. Raises like waiting for a result."""
        return []

    def check(self) -> None:  # noqa: B027 - threads cannot die by themselves
        """Raises WorkerLost if a worker has died or stopped; called while the engine is idle."""

    @property
    def overlaps(self) -> bool:
        """Whether `execute` returns before the step is computed. Otherwise planning a step ahead
        gains nothing, and requests that arrive meanwhile would wait for it."""
        return True

    @property
    def store(self) -> tuple[str, int] | None:
        """Address of the store for workers of other engines; None unless engines share experts."""
        return None

    @property
    def progress_counter(self) -> int:
        """Number of layers computed by the workers since the start; may be called from any
        thread."""
        return 0

    @property
    def hang_report(self) -> str:
        """`HOST:PATH` of the file with the state of the workers when one of them hung for the last
        time; empty if none did."""
        return ""

    @abstractmethod
    def workers(self) -> tuple[WorkerInfo, ...]:
        """Returns the workers by rank; may be called from any thread."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stops the workers and releases their memory. May be called twice."""


def build_executor(config: Config, **shell: Any) -> Executor:
    """Builds the executor that `parallel.executor` names; `shell` contains arguments of its
    constructor."""
    alone = config.parallel.world == 1
    name: str = config.parallel.executor
    if name == "auto":
        name = "inproc" if alone else "ray"
    if name == "inproc" and alone:
        name = "inline"
    if name != "ray":  # the workers are in this process
        check_nccl(config)
    module, _, kind = EXECUTORS[name].partition(":")
    executor: Executor = getattr(importlib.import_module(module), kind)(config, **shell)
    return executor


def agree_limits(config: Config, limits: Sequence[WorkerLimits]) -> ExecutorLimits:
    """Returns the smallest limits of all workers; one sequence must fit into the cache by itself.

    Raises ConfigError if `model.max_model_len` is set and does not fit.
    """
    num_blocks = min(limit.num_blocks for limit in limits)
    longest = min(limit.max_model_len for limit in limits)
    capacity_tokens = num_blocks * config.cache.block_tokens
    if config.model.max_model_len is not None and capacity_tokens < longest:
        raise ConfigError(
            f"model.max_model_len={longest} does not fit into the KV cache, which has room for "
            f"{capacity_tokens} tokens in {num_blocks} blocks; raise cache.memory_bytes (or "
            "cache.memory_fraction) or lower model.max_model_len"
        )
    first = limits[0]
    in_memory, on_disk = zip(*(limit.offload_blocks for limit in limits), strict=True)
    return ExecutorLimits(
        num_blocks,
        min(longest, capacity_tokens),
        first.vocab_size,
        first.samples,
        first.keeps_kv,
        (min(in_memory), min(on_disk)),
        "+".join(dict.fromkeys(limit.numerics for limit in limits)),
    )
