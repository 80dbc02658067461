"""A worker without tensors and the two channels of an engine, which the test plays."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from swell.configs.lora import Adapter
from swell.coordinator.transport.channel import Inbox, Outlet, make_keys
from swell.engine.executor.heartbeat_listener import HeartbeatListener
from swell.worker.comm.groups import GroupError
from swell.worker.comm.transport import AbortStuck
from swell.worker.loop import HeartbeatThread, WorkerLoop
from swell.worker.wire import (
    AdapterLoaded,
    AsyncModelRunnerOutput,
    GroupPlan,
    LoadAdapter,
    ModelRunnerOutput,
    Regroup,
    Regrouped,
    SchedulerOutput,
    Shutdown,
    WorkerCommand,
    WorkerFailure,
    WorkerHello,
    WorkerMessage,
)
from tests.support.deadlines import HANG_S

RANK = 3
STALL_S = 1.0


class StubOutput(AsyncModelRunnerOutput):
    def __init__(self, step: int) -> None:
        self.step = step

    def get_output(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(self.step)


class StubWorker:
    """Runs a function of the test for each step, by its number."""

    def __init__(self) -> None:
        self.progress_counter = 0
        self.executed: list[int] = []
        self.aborts: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self.steps: dict[int, Callable[[], object]] = {}
        self.forming: Callable[[], object] = lambda: None
        self.lost_peer = threading.Event()
        """Set when the groups report a failed peer."""
        self.loads: list[Callable[[], None]] = []
        """Callbacks that report an adapter as loaded."""

    def execute_model(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        self.executed.append(plan.step)
        self.steps.get(plan.step, lambda: None)()
        self.progress_counter += 1
        return StubOutput(plan.step)

    def regroup(self, plan: GroupPlan) -> Regrouped:
        self.forming()
        return Regrouped(RANK, plan.generation)

    def load_adapter(
        self, command: LoadAdapter, on_loaded: Callable[[AdapterLoaded], None]
    ) -> None:
        self.executed.append(-command.place)
        self.loads.append(
            lambda: on_loaded(AdapterLoaded(RANK, command.adapter.digest, "", command.number))
        )

    def abort(self, generation: int | None = None) -> None:
        self.aborts.put(generation)

    def poll_groups(self) -> None:
        if self.lost_peer.is_set():
            self.abort()

    def wait_for_abort(self) -> None:
        """Blocks until `abort` and raises, like a collective whose peers have left."""
        self.aborts.get(timeout=HANG_S)
        raise GroupError("a peer has gone")


class Engine:
    """The engine's ends of both channels, and the worker's threads."""

    def __init__(self) -> None:
        keys = make_keys()
        self.worker = StubWorker()
        self.inbox: Inbox[WorkerMessage] = Inbox(WorkerMessage, keys)
        self.heartbeats = HeartbeatListener(keys, "127.0.0.1", STALL_S)
        outlet: Outlet[WorkerCommand] = Outlet(self.inbox.address, WorkerCommand, keys)
        loop = WorkerLoop(RANK, self.worker, outlet)
        second: Outlet[WorkerCommand] = Outlet(self.heartbeats.address, WorkerCommand, keys)
        self.heartbeat_thread = HeartbeatThread(loop, second, STALL_S / 8)
        self.thread = threading.Thread(target=loop.run)
        self.thread.start()
        self.outlet = outlet
        self.said: list[WorkerMessage] = []
        self.peer = b""
        assert self.receive() == WorkerHello(RANK)

    def receive(self) -> WorkerMessage:
        deadline = time.monotonic() + HANG_S
        while not self.said:
            assert time.monotonic() < deadline, "the worker sent nothing"
            for peer, message in self.inbox.receive(0.1):
                self.peer = peer
                self.said.append(message)
        return self.said.pop(0)

    def send(self, *commands: WorkerCommand) -> None:
        for command in commands:
            self.inbox.send(self.peer, command)

    def close(self) -> None:
        self.send(Shutdown())
        self.thread.join(HANG_S)
        self.heartbeat_thread.stop()
        self.outlet.close()
        self.heartbeats.close()
        self.inbox.close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()
    assert not engine.thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


def plan(step: int) -> SchedulerOutput:
    return SchedulerOutput(step)


def test_results_are_in_order_and_every_plan_is_started(engine):
    engine.send(*(plan(step) for step in range(1, 9)))
    assert [engine.receive() for _ in range(8)] == [ModelRunnerOutput(step) for step in range(1, 9)]


@pytest.mark.parametrize(
    "error", [GroupError("a peer has gone", [2]), IndexError("slot 99"), AbortStuck("kernels run")]
)
def test_after_a_failure_nothing_is_computed_until_the_groups_form_again(engine, error):
    def fail() -> None:
        raise error

    engine.worker.steps[2] = fail
    engine.send(Regroup(GroupPlan(generation=4)))
    assert engine.receive() == Regrouped(RANK, 4)
    engine.send(plan(1))
    assert engine.receive() == ModelRunnerOutput(1)
    engine.send(plan(2), plan(3), plan(4))
    text, group = f"{type(error).__name__}: {error}", isinstance(error, GroupError)
    absent = [2] if group else []
    assert engine.receive() == WorkerFailure(2, RANK, text, group, 4, absent)
    assert engine.worker.aborts.get(timeout=HANG_S) is None, "it left its groups by itself"
    engine.send(Regroup(GroupPlan(generation=5)), plan(5))
    assert [engine.receive(), engine.receive()] == [Regrouped(RANK, 5), ModelRunnerOutput(5)]
    assert engine.worker.executed == [1, 2, 5]


def test_results_of_the_old_groups_are_never_sent(engine):
    """Results of the old groups are never sent: they would be taken for results of later steps."""
    engine.worker.steps[1] = lambda: until(lambda: sent)
    sent: list[bool] = []
    engine.send(plan(1), Regroup(GroupPlan(generation=1)), plan(2))
    sent.append(True)
    received = [engine.receive()]
    while received[-1] != ModelRunnerOutput(2):
        received.append(engine.receive())
    assert received[-2:] == [Regrouped(RANK, 1), ModelRunnerOutput(2)]


def test_an_abort_ends_a_step_and_older_aborts_have_no_effect(engine):
    engine.send(Regroup(GroupPlan(generation=2)))
    engine.receive()
    engine.worker.steps[1] = engine.worker.wait_for_abort
    until(lambda: RANK in engine.heartbeats.ranks)
    engine.heartbeats.abort(1)
    engine.send(plan(1))
    engine.heartbeats.abort(2)
    failure = engine.receive()
    assert isinstance(failure, WorkerFailure) and failure.group
    seen = {engine.worker.aborts.get() for _ in range(engine.worker.aborts.qsize())}
    assert 1 not in seen, "those groups had been left before"


def test_a_failed_peer_that_only_the_groups_know_ends_a_step(engine):
    engine.worker.steps[1] = engine.worker.wait_for_abort
    engine.send(plan(1))
    until(lambda: engine.worker.executed == [1])
    engine.worker.lost_peer.set()
    failure = engine.receive()
    assert isinstance(failure, WorkerFailure) and failure.group


def test_an_abort_before_the_groups_are_formed_is_not_missed(engine):
    """An abort that arrives before the groups are formed is not missed, although `Worker.regroup`
    begins by clearing earlier aborts."""

    def form() -> None:
        engine.heartbeats.abort(1)
        engine.worker.aborts.get(timeout=HANG_S)
        engine.worker.wait_for_abort()

    until(lambda: RANK in engine.heartbeats.ranks)
    engine.worker.forming = form
    engine.send(Regroup(GroupPlan(generation=1)))
    failure = engine.receive()
    assert isinstance(failure, WorkerFailure) and failure.group and failure.generation == 1
    engine.worker.forming = lambda: None
    engine.send(Regroup(GroupPlan(generation=2)))
    while engine.receive() != Regrouped(RANK, 2):
        """Skips failures of generation 1."""


def test_heartbeats_continue_during_a_step_and_a_missing_one_is_detected(engine):
    begun, done = threading.Event(), threading.Event()

    def compute() -> None:
        begun.set()
        done.wait(HANG_S)

    engine.worker.steps[1] = compute
    engine.send(plan(1))
    assert begun.wait(HANG_S)
    engine.worker.progress_counter = 41
    until(lambda: engine.heartbeats.progress_counter == 41)
    assert engine.heartbeats.stopped() == {}
    done.set()
    assert engine.receive() == ModelRunnerOutput(1)
    until(lambda: engine.heartbeats.progress_counter == 42)
    engine.heartbeat_thread._ending = True
    until(lambda: set(engine.heartbeats.stopped()) == {RANK})
    engine.heartbeats.forget(RANK)
    assert engine.heartbeats.stopped() == {} and engine.heartbeats.ranks == set()


def test_adapters_are_loaded_concurrently_with_steps_and_in_order(engine):
    """Adapters are loaded in parallel to the steps, in the order of the commands. An idle worker
    reports a loaded adapter at once."""
    adapter = Adapter("one", "/one", "digest")
    engine.send(plan(1), LoadAdapter(7, adapter, 3), plan(2))
    assert [engine.receive(), engine.receive()] == [ModelRunnerOutput(1), ModelRunnerOutput(2)]
    assert engine.worker.executed == [1, -7, 2]
    time.sleep(0.05)
    engine.worker.loads.pop()()
    assert engine.receive() == AdapterLoaded(RANK, "digest", "", 3)
    engine.send(plan(3))
    assert engine.receive() == ModelRunnerOutput(3)
