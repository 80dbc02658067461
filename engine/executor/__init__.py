"""How an engine reaches its workers."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from swell.configs.schema import Config, ConfigError
from swell.worker.wire import (
    AdapterLoaded,
    AsyncModelRunnerOutput,
    GroupPlan,
    LoadAdapter,
    Regrouped,
    SchedulerOutput,
    WorkerLimits,
)

EXECUTORS = {
    "inline": "swell.engine.executor.inline:InlineExecutor",
    "inproc": "swell.engine.executor.inproc:InprocExecutor",
    "ray": "swell.engine.executor.ray:RayExecutor",
}


class ExecutorError(RuntimeError):
    """A worker failed or was lost; the engine cannot go on."""


class GroupBroken(ExecutorError):
    """The workers are alive, but one of their groups has failed: `regroup` forms it again."""

    def __init__(self, message: str, absent: Iterable[int] = ()) -> None:
        """`absent`: engines that did not come to a group between engines, or cannot be reached, by
        their indices in its plan."""
        super().__init__(message)
        self.absent = tuple(absent)


class WorkerLost(ExecutorError):
    """Workers died or stopped: `repair` replaces them. The message names the ranks."""


class ExecutorLimits(msgspec.Struct, frozen=True):
    """What all workers of the engine together can hold."""

    num_blocks: int
    max_model_len: int
    vocab_size: int
    samples: bool = True
    """As in `WorkerLimits`, and so the next."""
    keeps_kv: bool = True
    offload_blocks: tuple[int, int] = (0, 0)

    @property
    def of_cache(self) -> tuple[int, int, tuple[int, int]]:
        """The arguments of `Worker.init_cache`."""
        return self.num_blocks, self.max_model_len, self.offload_blocks


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker as operators see it."""

    rank: int
    tensor: int
    pipeline: int
    pid: int


Progress = Callable[[str], None]
"""Called with a short text: what the start waits for."""


def loading(done_bytes: int, total_bytes: int) -> str:
    """The text of a load that is under way."""
    share = done_bytes / total_bytes if total_bytes else 1.0
    return f"loading weights, {share:.0%} of {total_bytes / 1e9:.1f} GB"


class Executor(ABC):
    """Workers of one engine: started once, given plans in order, answering in order.

    A result that is waited for may raise GroupBroken or WorkerLost; any other ExecutorError is
    the end of the engine.
    """

    @abstractmethod
    def start(self, progress: Progress = lambda text: None) -> ExecutorLimits:
        """Load the model and allocate the KV cache. Raises the exception of a worker."""

    @abstractmethod
    def execute(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        """Hand a plan to every worker; `overlaps` says whether this returns at once."""

    @abstractmethod
    def regroup(self, groups: GroupPlan) -> list[Regrouped]:
        """Let every worker leave its groups and form those of the plan; what each of them did.

        The executor fills in `generation` and `store`; the caller sets the rest. Blocks until all
        are there. Results of earlier steps that were not read are dropped. Raises GroupBroken if
        a peer does not come, WorkerLost if one of ours has gone.
        """

    @abstractmethod
    def abort(self) -> None:
        """Let workers inside a collective leave it with an error; from any thread."""

    def repair(self) -> None:
        """Replace the lost workers; the others keep their weights. `regroup` must follow, and
        the KV cache holds nothing. Raises ExecutorError if it cannot be done."""
        raise ExecutorError("this executor cannot replace a worker")

    def load_adapter(self, command: LoadAdapter) -> None:
        """Let every worker load an adapter, beside the steps that follow."""
        raise ExecutorError("this executor loads no adapters")

    def loaded_adapters(self, wait_s: float) -> list[AdapterLoaded]:
        """Those that all workers have loaded, or that one cannot, each once; after waiting for one.
        Raises as a result that is waited for."""
        return []

    def check(self) -> None:  # noqa: B027 - threads cannot die alone
        """Raise WorkerLost if a worker has died or stopped; called while the engine is idle."""

    @property
    def overlaps(self) -> bool:
        """Whether `execute` returns before the step is computed. If it does not, a step that is
        planned ahead gains nothing, and requests that arrive meanwhile wait for it."""
        return True

    @property
    def store(self) -> tuple[str, int] | None:
        """Where workers of other engines can meet ours; None unless engines share experts."""
        return None

    @property
    def progress_counter(self) -> int:
        """Layers computed by the workers since the start: progress. From any thread."""
        return 0

    @abstractmethod
    def workers(self) -> list[WorkerInfo]: ...

    @abstractmethod
    def shutdown(self) -> None:
        """End the workers and give their memory back. May be called twice."""


def build_executor(config: Config, **shell: Any) -> Executor:
    """The executor that `parallel.executor` names; `shell` goes to its constructor."""
    alone = config.parallel.world == 1
    name: str = config.parallel.executor
    if name == "auto":
        name = "inproc" if alone else "ray"
    if name == "inproc" and alone:
        name = "inline"
    module, _, kind = EXECUTORS[name].partition(":")
    executor: Executor = getattr(importlib.import_module(module), kind)(config, **shell)
    return executor


def agree_limits(config: Config, limits: Sequence[WorkerLimits]) -> ExecutorLimits:
    """The smallest of what each worker holds; a sequence must fit into the cache alone.

    Raises ConfigError if `model.max_model_len` is set and does not fit.
    """
    num_blocks = min(limit.num_blocks for limit in limits)
    wanted = min(limit.max_model_len for limit in limits)
    capacity_tokens = num_blocks * config.cache.block_tokens
    if config.model.max_model_len is not None and capacity_tokens < wanted:
        raise ConfigError(
            f"model.max_model_len={wanted} does not fit into the KV cache, which holds "
            f"{capacity_tokens} tokens in {num_blocks} blocks; raise cache.memory_bytes (or "
            "cache.memory_fraction) or lower model.max_model_len"
        )
    first = limits[0]
    in_memory, on_disk = zip(*(limit.offload_blocks for limit in limits), strict=True)
    return ExecutorLimits(
        num_blocks,
        min(wanted, capacity_tokens),
        first.vocab_size,
        first.samples,
        first.keeps_kv,
        (min(in_memory), min(on_disk)),
    )
