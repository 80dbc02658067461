"""Workers as Ray actors in the engine's placement group.

Ray places, starts and ends them; every plan and every result goes over the channel. Workers start
in no group: the first `regroup` forms their groups, and one worker that takes the place of another
goes through the same door.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
    GroupBroken,
    Progress,
    WorkerInfo,
    WorkerLost,
    agree_limits,
    loading,
)
from swell.engine.executor.beats import BeatListener
from swell.worker.actor import WorkerActor
from swell.worker.wire import (
    AsyncModelRunnerOutput,
    GroupPlan,
    ModelRunnerOutput,
    Regroup,
    Regrouped,
    SchedulerOutput,
    Shutdown,
    WorkerFailure,
    WorkerHello,
    WorkerLimits,
    WorkerMessage,
    WorkerProgress,
)

_DEATH_POLL_S = 0.1
"""How often a wait looks whether the workers live."""
_CULPRIT_S = 1.0
"""When a group fails because a worker of ours died, Ray says so within this time."""
_END_S = 5.0
"""How long workers may take to end when they are asked to."""
MAX_REPAIRS = 3
REPAIRS_PERIOD_S = 300.0
"""An engine that needs more than `MAX_REPAIRS` in this time has another trouble."""


class RayOutput(AsyncModelRunnerOutput):
    def __init__(self, executor: RayExecutor, step: int) -> None:
        self._executor = executor
        self._step = step

    def get_output(self) -> ModelRunnerOutput:
        return self._executor.wait_for(self._step)


@dataclass(eq=False, slots=True)
class _Member:
    """One worker process; its successor is another."""

    rank: int
    actor: Any
    is_near: bool
    """It lives on the node of the engine."""
    pid: int = 0
    run: Any = None
    peer: bytes | None = None


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
        self._beats = BeatListener(keys, host, config.cluster.stall_timeout_s)
        self._members: dict[int, _Member] = {}
        self._limits: ExecutorLimits | None = None
        self._store: tuple[str, int] | None = None
        self._generation = 0
        self._aborted = -1
        self._results: dict[int, ModelRunnerOutput] = {}
        self._lost: dict[int, str] = {}
        self._repaired_at: list[float] = []

    # ---------------------------------------------------------------- start and end

    def start(self, progress: Progress = lambda text: None) -> ExecutorLimits:
        """Engines that share experts are in no group until the first `regroup`."""
        world = self._config.parallel.world
        try:
            progress(f"starting {world} workers")
            self._bring_up(range(world), progress)
            if not self._config.parallel.expert:
                progress("forming groups")
                self.regroup(GroupPlan(generation=0))
        except ray.exceptions.RayTaskError as error:
            self.shutdown()
            if isinstance(error.cause, ValueError):
                raise ConfigError(str(error.cause)) from error
            raise
        except BaseException:
            self.shutdown()
            raise
        assert self._limits is not None
        return self._limits

    def shutdown(self) -> None:
        members, self._members = list(self._members.values()), {}
        for member in members:
            if member.peer is not None:
                self._inbox.send(member.peer, Shutdown())
        runs = [member.run for member in members if member.run is not None]
        if runs:
            ray.wait(runs, num_returns=len(runs), timeout=_END_S)
        for member in members:
            ray.kill(member.actor)
        self._beats.close()
        self._inbox.close()

    def _bring_up(self, ranks: Iterable[int], progress: Progress) -> None:
        """Create workers, let them load and allocate, and hear them on both channels."""
        limit_s = self._config.cluster.start_timeout_s
        nodes = placement_group_table(self._placement_group)["bundles_to_node_id"]
        order = rank_order(nodes)
        here = ray.get_runtime_context().get_node_id()
        news = []
        for rank in ranks:
            bundle = order[rank]
            news.append(_Member(rank, self._create(rank, bundle), nodes[bundle] == here))
            self._members[rank] = news[-1]
        progress(f"loading weights on {len(news)} workers")
        loaded = self._load(news, progress)
        for member, limits in zip(news, loaded, strict=True):
            member.pid = limits.pid
            if member.rank == 0:
                self._store = ray.get(member.actor.open_store.remote(), timeout=limit_s)
        if self._limits is None:
            self._limits = agree_limits(self._config, loaded)
        progress("allocating the KV cache")
        size = (self._limits.num_blocks, self._limits.max_model_len)
        ray.get([member.actor.init_cache.remote(*size) for member in news], timeout=limit_s)
        for member in news:
            member.run = member.actor.run.remote()
        progress("connecting the workers")
        while any(m.peer is None or m.rank not in self._beats.ranks for m in news):
            self._receive()
            for member in news:
                if ended := _ended(member):
                    raise ExecutorError(f"worker {member.rank} {ended} while it connected")

    def _create(self, rank: int, bundle: int) -> Any:
        bundles = self._placement_group.bundle_specs[bundle]
        kind: Any = WorkerActor
        addresses = (self._inbox.address, self._beats.address)
        return kind.options(
            num_cpus=bundles.get("CPU", 0),
            num_gpus=bundles.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._placement_group, placement_group_bundle_index=bundle
            ),
        ).remote(self._config, rank, self._local_workers, self._keys, *addresses)

    def _load(self, members: list[_Member], progress: Progress) -> list[WorkerLimits]:
        """Load on these workers, telling how far the first one is."""
        loads = [member.actor.load.remote() for member in members]
        deadline = time.monotonic() + self._config.cluster.start_timeout_s
        while len(ray.wait(loads, num_returns=len(loads), timeout=0)[0]) < len(loads):
            for message in self._receive():
                if isinstance(message, WorkerProgress) and message.rank == members[0].rank:
                    progress(loading(message.done_bytes, message.total_bytes))
            failed, _running = ray.wait(loads, num_returns=1, timeout=0)
            ray.get(failed)
            if time.monotonic() > deadline:
                raise ExecutorError(
                    f"workers {[m.rank for m in members]} did not load within "
                    f"cluster.start_timeout_s={self._config.cluster.start_timeout_s:g}"
                )
        limits: list[WorkerLimits] = ray.get(loads)
        return limits

    # ---------------------------------------------------------------- steps

    def execute(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        self._send_all(plan)
        return RayOutput(self, plan.step)

    def wait_for(self, step: int) -> ModelRunnerOutput:
        """The result of a step. Raises GroupBroken and WorkerLost."""
        with self._beats.step_out():
            while step not in self._results:
                said = self._receive()
                for message in said:
                    self._judge(message)
                if not said:
                    self.check()
        return self._results.pop(step)

    def check(self) -> None:
        """Raise WorkerLost if workers have died or stopped."""
        for rank, member in self._members.items():
            if ended := _ended(member):
                self._lost[rank] = f"(pid {member.pid}) {ended}"
        for rank, why in self._beats.stopped().items():
            self._lost.setdefault(rank, f"(pid {self._members[rank].pid}) {why}")
        if self._lost:
            lost = sorted(self._lost.items())
            raise WorkerLost("; ".join(f"worker {rank} {why}" for rank, why in lost))

    def _judge(self, message: WorkerMessage) -> None:
        """Raise if a worker told that its groups or itself have failed."""
        if not isinstance(message, WorkerFailure) or message.generation != self._generation:
            return
        self._blame(message)
        deadline = time.monotonic() + _CULPRIT_S
        while not self._lost and self._aborted < self._generation and time.monotonic() < deadline:
            for other in self._receive():
                if isinstance(other, WorkerFailure) and other.generation == self._generation:
                    self._blame(other)
            with suppress(WorkerLost):
                self.check()
        self.check()
        self.abort()
        raise GroupBroken(f"worker {message.rank}: {message.message}")

    def _blame(self, failure: WorkerFailure) -> None:
        if not failure.group:
            pid = self._members[failure.rank].pid
            self._lost[failure.rank] = f"(pid {pid}) failed: {failure.message}"

    # ---------------------------------------------------------------- groups and repair

    def regroup(self, groups: GroupPlan) -> None:
        self._generation += 1
        self._results.clear()
        store = self._store if self._config.parallel.world > 1 else None
        self._send_all(
            Regroup(msgspec.structs.replace(groups, generation=self._generation, store=store))
        )
        self._beats.forming(self._generation)
        absent = set(self._members)
        deadline = time.monotonic() + self._config.cluster.start_timeout_s
        while absent:
            said = self._receive()
            for message in said:
                if isinstance(message, Regrouped) and message.generation == self._generation:
                    absent.discard(message.rank)
                self._judge(message)
            if not said:
                self.check()
            if absent and time.monotonic() > deadline:
                self.abort()
                raise GroupBroken(f"workers {sorted(absent)} did not form their groups in time")
        self._results.clear()
        self._beats.grouped()

    def abort(self) -> None:
        self._aborted = self._generation
        self._beats.abort(self._generation)

    def repair(self) -> None:
        now = time.monotonic()
        self._repaired_at = [at for at in self._repaired_at if now - at < REPAIRS_PERIOD_S]
        if len(self._repaired_at) >= MAX_REPAIRS:
            raise ExecutorError(
                f"workers were lost more than {MAX_REPAIRS} times in {REPAIRS_PERIOD_S:g} s"
            )
        self._repaired_at.append(now)
        lost, self._lost = sorted(self._lost), {}
        for rank in lost:
            self._give_up(self._members.pop(rank))
        self.abort()
        try:
            self._bring_up(lost, lambda text: None)
        except ray.exceptions.RayError as error:
            raise ExecutorError(f"workers {lost} could not be replaced: {_line(error)}") from error

    @property
    def store(self) -> tuple[str, int] | None:
        return self._store if self._config.parallel.expert else None

    @property
    def ticks(self) -> int:
        return self._beats.ticks

    def workers(self) -> list[WorkerInfo]:
        tensor = self._config.parallel.tensor
        return [
            WorkerInfo(rank, rank % tensor, rank // tensor, member.pid)
            for rank, member in sorted(self._members.items())
        ]

    def _give_up(self, member: _Member) -> None:
        """End a worker that may be dead already, or stopped, or busy."""
        self._beats.forget(member.rank)
        if member.is_near and not _ended(member):
            # Ray asks first, and a stopped process does not answer.
            with suppress(ProcessLookupError):
                os.kill(member.pid, signal.SIGKILL)
        ray.kill(member.actor)

    # ---------------------------------------------------------------- the channel

    def _send_all(self, command: Any) -> None:
        frame = msgspec.Raw(msgspec.msgpack.encode(command))
        for member in self._members.values():
            assert member.peer is not None, "workers are connected by `start` and `repair`"
            self._inbox.send(member.peer, frame)

    def _receive(self) -> list[WorkerMessage]:
        """What living workers say, after waiting a moment for it; results are kept aside too."""
        said = []
        for peer, message in self._inbox.receive(_DEATH_POLL_S):
            if isinstance(message, WorkerHello):
                self._members[message.rank].peer = peer
            elif not isinstance(message, WorkerProgress) and peer not in self._peers:
                continue
            elif isinstance(message, ModelRunnerOutput):
                self._results[message.step] = message
            said.append(message)
        return said

    @property
    def _peers(self) -> set[bytes | None]:
        return {member.peer for member in self._members.values()}


def rank_order(bundle_nodes: dict[int, str]) -> Sequence[int]:
    """Bundles in the order in which ranks take them: node by node."""
    first_seen: dict[str, int] = {}
    for bundle in sorted(bundle_nodes):
        first_seen.setdefault(bundle_nodes[bundle], bundle)
    return sorted(bundle_nodes, key=lambda bundle: (first_seen[bundle_nodes[bundle]], bundle))


def _ended(member: _Member) -> str:
    """Why the worker is no more, or nothing while it runs."""
    if member.run is None or not ray.wait([member.run], timeout=0)[0]:
        return ""
    try:
        ray.get(member.run)
    except ray.exceptions.RayError as error:
        return f"died: {_line(error)}"
    return "ended"


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
