"""Engines that share collectives, without tensors: real servers and sockets, and threads for
workers.

A group is an epoch; the sums of a step are available when every engine has submitted it. An engine
that leaves a group breaks it for the others, as with a real transport.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from swell.configs.schema import Config, load
from swell.coordinator.service import CoordinatorService
from swell.coordinator.transport.channel import Outlet
from swell.coordinator.transport.coordinator_contact import CoordinatorEndpoint
from swell.engine.core import EngineCore
from swell.engine.executor import ExecutorLimits, GroupBroken, WorkerLost
from swell.engine.serving.server import EngineServer
from swell.engine.wire import AbortRequests, EngineCoreOutputs, EngineCoreRequest, KeepAlive
from swell.worker.wire import (
    AsyncModelRunnerOutput,
    GroupPlan,
    ModelRunnerOutput,
    Regrouped,
    SchedulerOutput,
)
from tests.engine.executor.fake_worker import VOCAB, FakeExecutor, FakeWorker
from tests.support.deadlines import HANG_S


@dataclass
class Group:
    """The engines of one epoch."""

    engines: int
    joined: set[int] = field(default_factory=set)
    steps: dict[int, dict[int, SchedulerOutput]] = field(default_factory=dict)
    broken: bool = False


class SharedGroups:
    """The groups of all epochs."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.groups: dict[int, Group] = {}


class LockstepExecutor(FakeExecutor):
    """One engine's workers."""

    def __init__(self, shared: SharedGroups, num_blocks: int = 256, block_tokens: int = 4) -> None:
        super().__init__(num_blocks, block_tokens)
        self._shared = shared
        self._group: Group | None = None
        self._index = 0
        self._epoch = 0
        self.steps = 0
        """The number of steps submitted in this epoch."""
        self.hold_forming = threading.Event()
        self.hold_forming.set()
        self.lost: str | None = None
        self.dead = False
        self.step_s = 0.0005

    def regroup(self, groups: GroupPlan) -> list[Regrouped]:
        self.abort()
        self.hold_forming.wait(HANG_S)
        with self._shared.changed:
            group = Group(groups.engines)
            if groups.engines > 1:
                group = self._shared.groups.setdefault(groups.epoch, group)
            assert group.engines == groups.engines
            self._group, self._index, self._epoch = group, groups.index, groups.epoch
            self.steps = 0
            if not groups.keep_states:
                self._queue.clear()
                self.worker = FakeWorker(len(self.worker.cache), self.worker.block_tokens)
            group.joined.add(groups.index)
            self._shared.changed.notify_all()
            done = self._shared.changed.wait_for(
                lambda: group.broken or len(group.joined) == group.engines, HANG_S
            )
            if group.broken or not done:
                raise GroupBroken(f"epoch {groups.epoch} did not form")
        return [Regrouped(0, groups.generation)]

    def abort(self) -> None:
        with self._shared.changed:
            if self._group is not None:
                self._group.broken = True
            self._shared.changed.notify_all()

    def repair(self) -> None:
        self.lost = None

    def execute(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        group = self._group
        assert group is not None
        assert plan.epoch == self._epoch or group.engines == 1, "a step of another epoch"
        super().execute(plan)
        with self._shared.changed:
            self.steps += 1
            group.steps.setdefault(self.steps, {})[self._index] = plan
            self._shared.changed.notify_all()
        return _Output(self, group, self.steps, plan.step)

    def result(self, group: Group, number: int, step: int) -> ModelRunnerOutput:
        time.sleep(self.step_s)
        with self._shared.changed:
            plans = group.steps[number]
            self._shared.changed.wait_for(
                lambda: group.broken or self.lost or len(plans) == group.engines
            )
            if self.lost:
                group.broken = True
                self._shared.changed.notify_all()
                raise WorkerLost(self.lost)
            if len(plans) < group.engines:
                raise GroupBroken("a peer has gone")
        output = self.run_until(step)
        return ModelRunnerOutput(
            output.step,
            output.sampled_token_ids,
            working=sum(plan.work for plan in plans.values()),
            pausing=sum(plan.pause for plan in plans.values()),
        )

    @property
    def progress_counter(self) -> int:
        return self.steps


class _Output(AsyncModelRunnerOutput):
    def __init__(self, executor: LockstepExecutor, group: Group, number: int, step: int) -> None:
        self._executor, self._group, self._number, self._step = executor, group, number, step

    def get_output(self) -> ModelRunnerOutput:
        return self._executor.result(self._group, self._number, self._step)


class Engine:
    """An engine's server, which runs on a thread."""

    def __init__(self, cluster: Cluster, rank: int) -> None:
        self.executor = LockstepExecutor(cluster.shared)
        core = EngineCore(cluster.config, self.executor, ExecutorLimits(256, 512, VOCAB))
        self.server = EngineServer(
            cluster.config, rank, core, cluster.service.keys, cluster.service.address
        )
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name=f"engine-{rank}")
        self.thread.start()

    def _run(self) -> None:
        try:
            self.server.run()
        except BaseException as error:
            self.failure = error

    def stop(self) -> None:
        self.server.stop()
        self.executor.abort()
        self.thread.join(HANG_S)
        assert not self.thread.is_alive()


class Cluster:
    """A coordinator, engines, and one client of all engines. Used as a context manager."""

    def __init__(self, **sections: dict[str, object]) -> None:
        cluster = {"heartbeat_s": 0.1, "stall_timeout_s": 10.0, **sections.pop("cluster", {})}
        self.config: Config = load(
            {
                "model": {"path": "m"},
                "parallel": {"expert": True},
                "cache": {"block_tokens": 4},
                "cluster": cluster,
                **sections,
            }
        )
        self.shared = SharedGroups()
        self.service = self._coordinate(None)
        self.engines: dict[int, Engine] = {}
        self.outlets: dict[int, Outlet[EngineCoreOutputs]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self._alive_at = 0.0

    def _coordinate(self, endpoint: CoordinatorEndpoint | None) -> CoordinatorService:
        return CoordinatorService(
            self.config.cluster, lockstep=True, endpoint=endpoint, recover=endpoint is not None
        )

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_error: object) -> None:
        for engine in self.engines.values():
            engine.stop()
        for outlet in self.outlets.values():
            outlet.close()
        self.service.stop()

    def start(self, *ranks: int) -> None:
        """Starts engines that are ready but not in the group."""
        for rank in ranks:
            self.engines[rank] = Engine(self, rank)
            address = self.engines[rank].server.address
            self.outlets[rank] = Outlet(address, EngineCoreOutputs, self.service.keys)

    def join(self, *ranks: int) -> None:
        self.start(*ranks)
        self.service.join([self.engines[rank].server.member for rank in ranks], HANG_S)

    def stop(self, rank: int) -> None:
        self.engines.pop(rank).stop()
        self.outlets.pop(rank).close()

    def send(self, rank: int, request: EngineCoreRequest) -> None:
        self.tokens.setdefault(request.request_id, [])
        self.outlets[rank].send(request)

    def abort(self, rank: int, request_id: str) -> None:
        self.outlets[rank].send(AbortRequests([request_id]))

    def receive(self) -> None:
        """Receives all messages that have arrived."""
        if time.monotonic() > self._alive_at + self.config.cluster.stall_timeout_s / 10:
            self._alive_at = time.monotonic()
            for outlet in self.outlets.values():
                outlet.send(KeepAlive())
        for outlet in self.outlets.values():
            for _ in range(10):  # engines may send faster than this client receives
                message = outlet.receive(0.001)
                if message is None:
                    break
                for output in message.outputs:
                    assert output.request_id not in self.ended, "an output after the last one"
                    self.tokens[output.request_id] += output.new_token_ids
                    if output.finished:
                        self.ended.add(output.request_id)

    def until(self, done: object) -> None:
        """Receives messages until `done()` is true."""
        deadline = time.monotonic() + HANG_S
        while not done():  # type: ignore[operator]
            assert time.monotonic() < deadline, self.describe()
            self.receive()

    def finish(self) -> None:
        self.until(lambda: self.ended == set(self.tokens))

    def settle(self) -> None:
        """Waits until every engine is idle."""
        self.until(lambda: all(not e.server.core.has_work for e in self.engines.values()))

    def restart_coordinator(self) -> None:
        """Stops the coordinator and starts another one at the same endpoint."""
        self.service.stop()
        self.start_coordinator()

    def start_coordinator(self) -> None:
        """Starts a coordinator at the endpoint of the stopped one."""
        address = self.service.address
        endpoint = CoordinatorEndpoint(
            self.service.keys, address.ipc.rpartition("-")[2], int(address.tcp.split(":")[-1])
        )
        self.service = self._coordinate(endpoint)

    def describe(self) -> str:
        lines = [str(self.service.view()), f"open: {set(self.tokens) - self.ended}"]
        for rank, engine in self.engines.items():
            lines.append(f"{rank}: {engine.server.core.wave_member} {engine.failure}")
        return "\n".join(lines)
