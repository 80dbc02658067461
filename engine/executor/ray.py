"""Workers as Ray actors in the engine's placement group.

Ray places, starts and stops them; everything after the loading of weights is sent over the channel.
Workers start without groups: a `regroup` forms them, and adds a replacement worker in the same way.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from swell.configs.runtime.log import StructuredLogger, first_line
from swell.configs.runtime.network import other_ports
from swell.configs.schema import Config, ConfigError
from swell.coordinator.transport.channel import ChannelKeys, Inbox
from swell.engine.executor import (
    ALLOCATING_CACHE,
    Executor,
    ExecutorError,
    ExecutorLimits,
    GroupBroken,
    Progress,
    WorkerInfo,
    WorkerLost,
    agree_limits,
    phase_text,
)
from swell.engine.executor.adapter_loads import AdapterLoads
from swell.engine.executor.hang_report import HangReports
from swell.engine.executor.heartbeat_listener import HeartbeatListener
from swell.engine.executor.host_shares import stage_order
from swell.engine.executor.process_killer import kill_process
from swell.engine.executor.worker_table import WorkerTable
from swell.worker.actor import WorkerActor
from swell.worker.wire import (
    AdapterLoaded,
    AsyncModelRunnerOutput,
    CacheReady,
    GroupPlan,
    InitCache,
    LoadAdapter,
    MeasureMemory,
    MemoryMeasured,
    ModelRunnerOutput,
    Regroup,
    Regrouped,
    SchedulerOutput,
    Shutdown,
    StartMessage,
    WorkerCommand,
    WorkerFailure,
    WorkerHello,
    WorkerLimits,
    WorkerMessage,
)

Answer = TypeVar("Answer", MemoryMeasured, CacheReady)

_DEATH_POLL_S = 0.1
"""How often a wait checks whether the workers are alive."""
_FAILURE_GRACE_S = 1.0
"""If a group fails because a worker of this engine died, Ray reports the death within this time."""
_END_S = 5.0
"""How long workers may take to stop after `Shutdown`."""
MAX_REPAIRS = 3
REPAIRS_PERIOD_S = 300.0
"""An engine that needs more than `MAX_REPAIRS` in this time has another problem."""
_RELOAD_TIMEOUT_S = 30.0
"""How long an engine waits until a replacement worker has loaded its adapters."""


@dataclass(eq=False, slots=True)
class RayWorker:
    """One worker process; its replacement is another object."""

    rank: int
    actor: Any
    node: str
    """The node of its bundle."""
    pid: int = 0
    run: Any = None
    peer: bytes | None = None

    def exit_reason(self) -> str:
        """Returns why the worker has stopped, or an empty string while it runs."""
        if self.run is None or not ray.wait([self.run], timeout=0)[0]:
            return ""
        try:
            ray.get(self.run)
        except ray.exceptions.RayError as error:
            return f"died: {first_line(error)}"
        return "ended"


class RayOutput(AsyncModelRunnerOutput):
    def __init__(self, executor: RayExecutor, step: int) -> None:
        self._executor = executor
        self._step = step

    def get_output(self) -> ModelRunnerOutput:
        return self._executor.wait_for(self._step)


class RayExecutor(Executor):
    """One actor per worker; the tensor-parallel ranks of a stage share a bundle and so a node."""

    def __init__(
        self,
        config: Config,
        *,
        placement_group: Any,
        keys: ChannelKeys,
        host: str,
        workers_by_node: Mapping[str, int] | None = None,
        **_shell: Any,
    ) -> None:
        """`workers_by_node`: number of workers of all engines on a node; default: this engine's."""
        self._config = config
        self._placement_group = placement_group
        self._keys = keys
        self._workers_by_node = workers_by_node or {}
        cluster = config.cluster
        ports = other_ports(cluster.port_range)
        self._inbox: Inbox[WorkerMessage] = Inbox(WorkerMessage, keys, host, ports=ports)
        self._hangs = HangReports(self._inbox.address.ipc)
        self._heartbeats = HeartbeatListener(keys, host, cluster.stall_timeout_s, ports)
        self._workers: dict[int, RayWorker] = {}
        self._table = WorkerTable(config.parallel.tensor, config.parallel.world)
        self._bundles: Sequence[int] = ()
        """The bundles of the pipeline stages, fixed at the first start: a replacement uses its
        predecessor's bundle, even if Ray has moved bundles to other nodes meanwhile."""
        self._limits: ExecutorLimits | None = None
        self._store: tuple[str, int] | None = None
        self._generation = 0
        self._aborted = -1
        self._results: dict[int, ModelRunnerOutput] = {}
        self._lost: dict[int, str] = {}
        self._refusal = ""
        """Why a worker has refused to start."""
        self._loads = AdapterLoads(config.parallel.world)
        self._loaded: list[AdapterLoaded] = []
        """Loaded by all workers, and not returned yet."""
        self._repaired_at: list[float] = []
        self._log = StructuredLogger("engine.executor")

    # ---------------------------------------------------------------- start and end

    def start(self, progress: Progress = lambda text: None) -> ExecutorLimits:
        ranks = range(self._config.parallel.world)
        try:
            progress(f"starting {len(ranks)} workers")
            self._start_workers(ranks, progress)
            progress("forming groups")
            self.regroup(GroupPlan(generation=0))
            progress("measuring memory")
            self._limits = agree_limits(self._config, self._measure(ranks, progress))
            progress(ALLOCATING_CACHE)
            self._init_caches(ranks, self._limits, progress)
            self._table.set_ready(ranks)
        except ray.exceptions.RayTaskError as error:
            self.shutdown()
            if isinstance(error.cause, ValueError):
                raise ConfigError(str(error.cause)) from error
            raise
        except BaseException:
            self.shutdown()
            raise
        return self._limits

    def shutdown(self) -> None:
        workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            if worker.peer is not None:
                self._inbox.send(worker.peer, Shutdown())
        runs = [worker.run for worker in workers if worker.run is not None]
        if runs:
            ray.wait(runs, num_returns=len(runs), timeout=_END_S)
        for worker in workers:
            ray.kill(worker.actor)
        self._heartbeats.close()
        self._inbox.close()

    def _start_workers(self, ranks: Iterable[int], progress: Progress) -> None:
        """Creates workers, lets them load, and waits until they connect on both channels."""
        limit_s = self._config.cluster.start_timeout_s
        nodes = placement_group_table(self._placement_group)["bundles_to_node_id"]
        self._bundles = self._bundles or stage_order(nodes)
        new_workers = []
        for rank in ranks:
            bundle = self._bundles[rank // self._config.parallel.tensor]
            node = nodes[bundle]
            new_workers.append(RayWorker(rank, self._create(rank, bundle, node), node))
            self._workers[rank] = new_workers[-1]
        self._load(new_workers, progress)
        for worker in new_workers:
            if worker.rank == 0:
                self._store = ray.get(worker.actor.open_store.remote(), timeout=limit_s)
            worker.run = worker.actor.run.remote(self._generation)
        progress("connecting the workers")
        deadline = time.monotonic() + limit_s
        late = f"a new worker did not connect within cluster.start_timeout_s={limit_s:g}"
        while any(m.peer is None or m.rank not in self._heartbeats.ranks for m in new_workers):
            self._receive()
            for worker in new_workers:
                if (ended := worker.exit_reason()) or time.monotonic() > deadline:
                    raise ExecutorError(f"worker {worker.rank} {ended}" if ended else late)

    def _measure(self, ranks: Sequence[int], progress: Progress) -> list[WorkerLimits]:
        """Lets workers measure their memory. Raises ConfigError if nothing fits."""
        self._send(ranks, MeasureMemory())
        limits = []
        for measured in self._answers(ranks, MemoryMeasured, "measure their memory", progress):
            if measured.limits is None:
                raise ConfigError(measured.refusal)
            limits.append(measured.limits)
        return limits

    def _init_caches(
        self, ranks: Sequence[int], limits: ExecutorLimits, progress: Progress
    ) -> None:
        """Lets workers allocate their KV caches, and capture their steps."""
        self._send(ranks, InitCache(*limits.of_cache))
        for _ready in self._answers(ranks, CacheReady, "allocate their KV cache", progress):
            pass

    def _answers(
        self, ranks: Sequence[int], kind: type[Answer], what: str, progress: Progress
    ) -> Iterator[Answer]:
        """Yields a message of this kind from each of these workers, and shows the progress of the
        first one. Raises GroupBroken, WorkerLost, and ExecutorError after
        `cluster.start_timeout_s`."""
        limit_s = self._config.cluster.start_timeout_s
        deadline = time.monotonic() + limit_s
        missing = set(ranks)
        while missing:
            messages = self._receive()
            for message in messages:
                self._show(message, ranks[0], progress)
                if isinstance(message, kind):
                    missing.discard(message.rank)
                    yield message
                elif isinstance(message, WorkerFailure) and message.rank in ranks:
                    self._raise_if_failed(message)
            if not messages:
                self.check()
            if missing and time.monotonic() > deadline:
                raise ExecutorError(
                    f"workers {sorted(missing)} did not {what} within "
                    f"cluster.start_timeout_s={limit_s:g}"
                )

    def _load_adapters(self, ranks: list[int]) -> None:
        """Lets replacement workers load the adapters of their predecessors. An adapter that one
        cannot load is reported like in `loaded_adapters`."""
        for command in self._loads.replace_workers(ranks):
            self._send(ranks, command)
        deadline = time.monotonic() + _RELOAD_TIMEOUT_S
        while self._loads.missing() and time.monotonic() < deadline:
            self._receive()
            self.check()
        self._loaded += self._loads.give_up(_RELOAD_TIMEOUT_S)

    def _create(self, rank: int, bundle: int, node: str) -> Any:
        resources = self._placement_group.bundle_specs[bundle]
        tensor, world = self._config.parallel.tensor, self._config.parallel.world
        local_workers = self._workers_by_node.get(node, world)
        kind: Any = WorkerActor
        addresses = (self._inbox.address, self._heartbeats.address)
        return kind.options(
            num_cpus=resources.get("CPU", 0) / tensor,
            num_gpus=resources.get("GPU", 0) / tensor,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self._placement_group, placement_group_bundle_index=bundle
            ),
        ).remote(self._config, rank, local_workers, self._keys, *addresses)

    def _load(self, workers: list[RayWorker], progress: Progress) -> None:
        """Loads the model on these workers, and reports the progress of the first one."""
        loads = [worker.actor.load.remote() for worker in workers]
        deadline = time.monotonic() + self._config.cluster.start_timeout_s
        while len(ray.wait(loads, num_returns=len(loads), timeout=0)[0]) < len(loads):
            for message in self._receive():
                self._show(message, workers[0].rank, progress)
            failed, _running = ray.wait(loads, num_returns=1, timeout=0)
            ray.get(failed)
            if time.monotonic() > deadline:
                raise ExecutorError(
                    f"workers {[m.rank for m in workers]} did not load within "
                    f"cluster.start_timeout_s={self._config.cluster.start_timeout_s:g}"
                )
        for worker, pid in zip(workers, ray.get(loads), strict=True):
            worker.pid = pid
            self._table.set_pid(worker.rank, pid)

    def _show(self, message: WorkerMessage, rank: int, progress: Progress) -> None:
        """Shows a report of this worker."""
        if isinstance(message, StartMessage) and message.rank == rank:
            progress(phase_text(message))

    # ---------------------------------------------------------------- steps

    def execute(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        self._send(self._workers, plan)
        return RayOutput(self, plan.step)

    def wait_for(self, step: int) -> ModelRunnerOutput:
        """Returns the result of a step. Raises GroupBroken and WorkerLost."""
        with self._heartbeats.awaiting_step():
            while step not in self._results:
                messages = self._receive()
                for message in messages:
                    self._raise_if_failed(message)
                if not messages:
                    self.check()
        return self._results.pop(step)

    def check(self) -> None:
        """Raises WorkerLost if workers have died or stopped."""
        for rank, worker in self._workers.items():
            if ended := worker.exit_reason():
                self._lost[rank] = f"(pid {worker.pid}) {ended}"
        for rank, why in self._heartbeats.stopped().items():
            self._lost.setdefault(rank, f"(pid {self._workers[rank].pid}) {why}")
        if self._lost:
            self._table.set_lost(self._lost)
            lost = sorted(self._lost.items())
            raise WorkerLost("; ".join(f"worker {rank} {why}" for rank, why in lost))

    def _raise_if_failed(self, message: WorkerMessage) -> None:
        """Raises if the message reports that a worker or its groups have failed. A worker that has
        refused to start is the reason of both."""
        if not isinstance(message, WorkerFailure) or message.generation != self._generation:
            return
        self._record_failure(message)
        deadline = time.monotonic() + _FAILURE_GRACE_S
        while not self._knows_reason and time.monotonic() < deadline:
            for other in self._receive():
                if isinstance(other, WorkerFailure) and other.generation == self._generation:
                    self._record_failure(other)
            with suppress(WorkerLost):
                self.check()
        if self._refusal:
            raise ConfigError(self._refusal)
        self.check()
        self.abort()
        raise GroupBroken(f"worker {message.rank}: {message.message}", message.absent)

    @property
    def _knows_reason(self) -> bool:
        """Whether it is known why groups have failed."""
        return bool(self._lost or self._refusal) or self._aborted >= self._generation

    def _record_failure(self, failure: WorkerFailure) -> None:
        if not failure.group:
            pid = self._workers[failure.rank].pid
            self._lost[failure.rank] = f"(pid {pid}) failed: {failure.message}"

    def load_adapter(self, command: LoadAdapter) -> None:
        self._send(self._workers, self._loads.begin(command))

    def loaded_adapters(self, wait_s: float) -> list[AdapterLoaded]:
        if not self._loaded:
            messages = self._receive(wait_s)
            for message in messages:
                self._raise_if_failed(message)
            if wait_s and not messages:
                self.check()
        loaded, self._loaded = self._loaded, []
        return loaded

    # ---------------------------------------------------------------- groups and repair

    def regroup(self, groups: GroupPlan) -> list[Regrouped]:
        self._generation += 1
        self._results.clear()
        store = self._store if self._config.parallel.world > 1 else None
        plan = msgspec.structs.replace(
            groups, generation=self._generation, store=store, secret=secrets.token_bytes()
        )
        self._send(self._workers, Regroup(plan))
        self._heartbeats.forming(self._generation)
        absent, regrouped = set(self._workers), []
        deadline = time.monotonic() + self._config.cluster.start_timeout_s
        while absent:
            messages = self._receive()
            for message in messages:
                if isinstance(message, Regrouped) and message.generation == self._generation:
                    absent.discard(message.rank)
                    regrouped.append(message)
                self._raise_if_failed(message)
            if not messages:
                self.check()
            if absent and time.monotonic() > deadline:
                self.abort()
                raise GroupBroken(f"workers {sorted(absent)} did not form their groups in time")
        self._results.clear()
        self._heartbeats.groups_formed()
        return regrouped

    def abort(self) -> None:
        self._aborted = self._generation
        self._heartbeats.abort(self._generation)

    def repair(self) -> None:
        now = time.monotonic()
        self._repaired_at = [at for at in self._repaired_at if now - at < REPAIRS_PERIOD_S]
        if len(self._repaired_at) >= MAX_REPAIRS:
            raise ExecutorError(
                f"workers failed more than {MAX_REPAIRS} times in {REPAIRS_PERIOD_S:g} s"
            )
        self._repaired_at.append(now)
        lost, self._lost = sorted(self._lost), {}
        if hanging := self._heartbeats.stopped():
            pids = [self._workers[rank].pid for rank in hanging]
            nodes = {worker.node for worker in self._workers.values()}
            self._hangs.save(self._heartbeats.describe(), pids, nodes)
        self._table.replace(lost)
        for rank in lost:
            self._kill(self._workers.pop(rank))
        self.abort()
        try:
            self._start_workers(lost, lambda text: None)
            assert self._limits is not None, "the engine has started"
            self._init_caches(lost, self._limits, lambda text: None)
            self._load_adapters(lost)
            self._table.set_ready(lost)
        except (GroupBroken, WorkerLost):
            # The next repair replaces them, too: they may lack their caches or adapters.
            self._lost = dict.fromkeys(lost, "was not replaced completely") | self._lost
            raise
        except ray.exceptions.RayError as error:
            raise ExecutorError(
                f"workers {lost} could not be replaced: {first_line(error)}"
            ) from error

    @property
    def store(self) -> tuple[str, int] | None:
        return self._store if self._config.parallel.expert else None

    @property
    def progress_counter(self) -> int:
        return self._heartbeats.progress_counter

    def workers(self) -> tuple[WorkerInfo, ...]:
        return self._table.workers

    @property
    def hang_report(self) -> str:
        return self._hangs.newest

    def _kill(self, worker: RayWorker) -> None:
        """Kills a worker that may be dead already, or stopped, or busy. Frees its memory, unless
        its node cannot be reached."""
        self._heartbeats.forget(worker.rank)
        if worker.pid and not worker.exit_reason():
            try:
                kill_process(worker.pid, worker.node)
            except ray.exceptions.RayError as error:
                self._log.warning(
                    "worker has not terminated yet", rank=worker.rank, error=first_line(error)
                )
        ray.kill(worker.actor)

    # ---------------------------------------------------------------- the channel

    def _send(self, ranks: Iterable[int], command: WorkerCommand) -> None:
        frame = msgspec.Raw(msgspec.msgpack.encode(command))
        for worker in map(self._workers.__getitem__, ranks):
            assert worker.peer is not None, "workers are connected by `start` and `repair`"
            self._inbox.send(worker.peer, frame)

    def _receive(self, wait_s: float = _DEATH_POLL_S) -> list[WorkerMessage]:
        """Returns messages of live workers, after waiting briefly for one; also stores results."""
        messages = []
        for peer, message in self._inbox.receive(wait_s):
            if isinstance(message, WorkerHello):
                self._workers[message.rank].peer = peer
            elif not isinstance(message, StartMessage) and peer not in self._peers:
                continue
            elif isinstance(message, ModelRunnerOutput):
                self._results[message.step] = message
            elif isinstance(message, AdapterLoaded):
                self._loaded += filter(None, [self._loads.answer(message)])
            elif isinstance(message, MemoryMeasured):
                self._refusal = self._refusal or message.refusal
            messages.append(message)
        return messages

    @property
    def _peers(self) -> set[bytes | None]:
        return {worker.peer for worker in self._workers.values()}
