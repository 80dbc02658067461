"""Workers as Ray actors in the engine's placement group.

Ray places, starts and watches them; every plan and every result goes over the channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from swell.configs.schema import Config, ConfigError
from swell.coordinator.channel import ChannelKeys, Inbox
from swell.engine.executor import (
    Executor,
    ExecutorError,
    ExecutorLimits,
    Progress,
    WorkerInfo,
    agree_limits,
    loading,
)
from swell.worker.actor import WorkerActor
from swell.worker.wire import (
    AsyncModelRunnerOutput,
    GroupPlan,
    ModelRunnerOutput,
    Regrouped,
    SchedulerOutput,
    Shutdown,
    WorkerBeat,
    WorkerFailure,
    WorkerHello,
    WorkerLimits,
    WorkerMessage,
    WorkerProgress,
)

_DEATH_POLL_S = 0.2
"""How often a wait for a result looks whether the workers live."""


class RayOutput(AsyncModelRunnerOutput):
    def __init__(self, executor: RayExecutor, step: int) -> None:
        self._executor = executor
        self._step = step

    def get_output(self) -> ModelRunnerOutput:
        return self._executor.wait_for(self._step)


class RayExecutor(Executor):
    """One actor for each worker; tensor-parallel ranks are neighbours on a node."""

    def __init__(
        self,
        config: Config,
        *,
        placement_group: Any,
        keys: ChannelKeys,
        host: str,
        workers_per_machine: int = 0,
    ) -> None:
        self._config = config
        self._placement_group = placement_group
        self._keys = keys
        self._local_workers = workers_per_machine or config.parallel.world
        self._inbox: Inbox[WorkerMessage] = Inbox(WorkerMessage, keys, host)
        self._actors: list[Any] = []
        self._peers: dict[int, bytes] = {}
        self._runs: list[Any] = []
        self._pids: list[int] = []
        self._results: dict[int, ModelRunnerOutput] = {}

    def start(self, progress: Progress = lambda text: None) -> ExecutorLimits:
        try:
            return self._start(progress)
        except ray.exceptions.RayTaskError as error:
            self.shutdown()
            if isinstance(error.cause, ValueError):
                raise ConfigError(str(error.cause)) from error
            raise
        except BaseException:
            self.shutdown()
            raise

    def _start(self, progress: Progress) -> ExecutorLimits:
        world = self._config.parallel.world
        progress(f"starting {world} workers")
        order = rank_order(placement_group_table(self._placement_group)["bundles_to_node_id"])
        self._actors = [self._create(rank, bundle) for rank, bundle in enumerate(order[:world])]
        store = ray.get(self._actors[0].open_store.remote())
        progress(f"loading weights on {world} workers")
        loaded = self._load(store, progress)
        self._pids = [limits.pid for limits in loaded]
        limits = agree_limits(self._config, loaded)
        progress("allocating the KV cache")
        ray.get(
            [a.init_cache.remote(limits.num_blocks, limits.max_model_len) for a in self._actors]
        )
        self._runs = [actor.run.remote() for actor in self._actors]
        progress("connecting the workers")
        while len(self._peers) < world:
            self._receive()
        return limits

    def execute(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        frame = msgspec.Raw(msgspec.msgpack.encode(plan))
        for peer in self._peers.values():
            self._inbox.send(peer, frame)
        return RayOutput(self, plan.step)

    def wait_for(self, step: int) -> ModelRunnerOutput:
        while step not in self._results:
            self._receive()
        return self._results.pop(step)

    def regroup(self, groups: GroupPlan) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        raise NotImplementedError

    def workers(self) -> list[WorkerInfo]:
        tensor = self._config.parallel.tensor
        return [
            WorkerInfo(rank, rank % tensor, rank // tensor, pid)
            for rank, pid in enumerate(self._pids)
        ]

    def shutdown(self) -> None:
        for peer in self._peers.values():
            self._inbox.send(peer, Shutdown())
        if self._runs:
            ray.wait(self._runs, num_returns=len(self._runs), timeout=5)
        for actor in self._actors:
            ray.kill(actor)
        self._actors, self._runs = [], []
        self._peers.clear()
        self._inbox.close()

    def _create(self, rank: int, bundle: int) -> Any:
        bundles = self._placement_group.bundle_specs[bundle]
        kind: Any = WorkerActor
        return kind.options(
            num_cpus=bundles.get("CPU", 0),
            num_gpus=bundles.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._placement_group, placement_group_bundle_index=bundle
            ),
        ).remote(self._config, rank, self._local_workers, self._keys, self._inbox.address)

    def _load(self, store: tuple[str, int], progress: Progress) -> list[WorkerLimits]:
        """Load on all workers, telling how far the first one is."""
        loads = [actor.load.remote(store, 0) for actor in self._actors]
        while len(ray.wait(loads, num_returns=len(loads), timeout=0)[0]) < len(loads):
            for _peer, message in self._inbox.receive(_DEATH_POLL_S):
                if isinstance(message, WorkerProgress) and message.rank == 0:
                    progress(loading(message.done_bytes, message.total_bytes))
            failed, _running = ray.wait(loads, num_returns=1, timeout=0)
            ray.get(failed)
        limits: list[WorkerLimits] = ray.get(loads)
        return limits

    def _receive(self) -> None:
        """Take in what workers said, or find out that one of them is dead."""
        heard = False
        for peer, message in self._inbox.receive(_DEATH_POLL_S):
            heard = True
            match message:
                case ModelRunnerOutput():
                    self._results[message.step] = message
                case WorkerHello():
                    self._peers[message.rank] = peer
                case WorkerFailure():
                    raise ExecutorError(f"worker {message.rank} failed: {message.message}")
                case WorkerProgress() | WorkerBeat() | Regrouped():
                    """The last words of a load that has ended."""
        if not heard:
            self._check_alive()

    def _check_alive(self) -> None:
        ended, _running = ray.wait(self._runs, num_returns=1, timeout=0) if self._runs else ([], [])
        for run in ended:
            rank = self._runs.index(run)
            try:
                ray.get(run)
            except ray.exceptions.RayError as error:
                raise ExecutorError(f"worker {rank} died: {str(error).splitlines()[0]}") from None
            raise ExecutorError(f"worker {rank} ended")


def rank_order(bundle_nodes: dict[int, str]) -> Sequence[int]:
    """Bundles in the order in which ranks take them: node by node."""
    first_seen: dict[str, int] = {}
    for bundle in sorted(bundle_nodes):
        first_seen.setdefault(bundle_nodes[bundle], bundle)
    return sorted(bundle_nodes, key=lambda bundle: (first_seen[bundle_nodes[bundle]], bundle))
