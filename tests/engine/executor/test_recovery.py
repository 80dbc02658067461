"""How an engine recovers by itself from lost workers, broken groups and clients that have left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from swell.coordinator.transport.channel import Inbox, make_keys
from swell.coordinator.wave_protocol.wave_interface import Phase
from swell.coordinator.wave_protocol.waves import WaveMember
from swell.coordinator.wire import (
    Broken,
    CoordinatorMessage,
    EngineHello,
    EngineReport,
    Introduce,
    Pause,
    Paused,
    ReconfigureDistributedRequest,
    Repaired,
    Resume,
)
from swell.engine import core
from swell.engine.executor import ExecutorError, GroupBroken, WorkerLost
from swell.engine.wire import FinishReason, KeepAlive
from swell.worker.wire import (
    AsyncModelRunnerOutput,
    GroupPlan,
    ModelRunnerOutput,
    Regrouped,
    SchedulerOutput,
)
from tests.engine.executor.fake_worker import expected
from tests.engine.serving.test_server import LONG, Engine, StepExecutor, request
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow


class FragileExecutor(StepExecutor):
    """An executor that raises a given error once, from the result of a step."""

    breaks_by: ExecutorError | None = None
    repair_fails = False
    repair_s = 0.0
    calls: tuple[str, ...] = ()

    sees: Callable[[SchedulerOutput], None] = staticmethod(lambda plan: None)

    def execute(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        self.sees(plan)
        return _Fragile(self, super().execute(plan))

    def repair(self) -> None:
        self.calls += ("repair",)
        time.sleep(self.repair_s)
        if self.repair_fails:
            raise ExecutorError("no room for a worker")

    def regroup(self, groups: GroupPlan) -> list[Regrouped]:
        regrouped = super().regroup(groups)
        self.calls += ("regroup",)
        return regrouped

    def abort(self) -> None:
        self.calls += ("abort",)


class _Fragile(AsyncModelRunnerOutput):
    def __init__(self, executor: FragileExecutor, output: AsyncModelRunnerOutput) -> None:
        self._executor, self._output = executor, output

    def get_output(self) -> ModelRunnerOutput:
        error, self._executor.breaks_by = self._executor.breaks_by, None
        if error is not None:
            raise error
        return self._output.get_output()


class CoordinatorInbox:
    """The coordinator's side of the channel: keeps received messages and can send commands."""

    def __init__(self, inbox: Inbox[CoordinatorMessage]) -> None:
        self.inbox = inbox
        self.peer = b""
        self.received: list[CoordinatorMessage] = []

    def until(self, kind: object) -> CoordinatorMessage:
        """Returns the next message of a kind."""
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            for peer, message in self.inbox.receive(0.05):
                self.peer = peer
                self.received.append(message)
            for message in self.received:
                if isinstance(message, kind):
                    self.received.remove(message)
                    return message
        raise AssertionError(f"no {kind} in {self.received}")


Harness = tuple[Engine, CoordinatorInbox]


def make_harness(**cluster: float) -> Iterator[Harness]:
    keys = make_keys()
    inbox: Inbox[CoordinatorMessage] = Inbox(CoordinatorMessage, keys)
    engine = Engine(keys, inbox.address, kind=FragileExecutor, **cluster)
    yield engine, CoordinatorInbox(inbox)
    engine.close()
    inbox.close()


@pytest.fixture
def harness() -> Iterator[Harness]:
    yield from make_harness()


@pytest.fixture
def harness_with_short_timeouts() -> Iterator[Harness]:
    yield from make_harness(stall_timeout_s=2.0)


@pytest.fixture
def lockstep_harness(monkeypatch) -> Iterator[Harness]:
    """Yields an engine in a group whose heartbeats are so rare that no test waits for one."""
    monkeypatch.setattr(core, "NullMember", WaveMember)
    yield from make_harness(heartbeat_s=60.0, stall_timeout_s=240.0)


@pytest.mark.parametrize("error", [WorkerLost("worker 1 died"), GroupBroken("a peer has gone")])
def test_requests_continue_unchanged_after_a_recovery(harness, error) -> None:
    engine, inbox = harness
    client = engine.client()
    requests = [request(f"r{i}", [1, i], max_tokens=200, seed=i) for i in range(8)]
    engine.executor.step_s = 0.02
    for wanted in requests:
        client.send(wanted)
    client.receive_until(lambda: len(client.tokens) == len(requests))
    engine.executor.breaks_by = error
    engine.executor.step_s = 0.001
    client.receive_until(lambda: len(client.ended) == len(requests))
    for wanted in requests:
        assert client.tokens[wanted.request_id] == expected(wanted)
    lost = isinstance(error, WorkerLost)
    assert engine.executor.calls == (("repair", "regroup") if lost else ("regroup",))
    broken = inbox.until(Broken)
    assert (broken.repairing, broken.reason) == (lost, str(error))
    if lost:
        assert inbox.until(Repaired).incarnation == broken.incarnation == engine.server.incarnation
    client.wait_until_idle()


def test_a_request_in_every_failed_step_is_failed(harness) -> None:
    """A request that is in every failed step is terminated and the other requests continue: after
    the first loss, two suspects are never computed in the same step."""
    engine, _inbox_reader = harness
    prompts = {"poison": [13] * 9, **{f"r{i}": [1, i] for i in range(4)}}

    def lose_worker(plan: SchedulerOutput) -> None:
        slots = {row.slot for row in plan.new_requests if row.token_ids[0] == 13}
        if slots.intersection(plan.slots):
            engine.executor.breaks_by = WorkerLost("worker 1 died")

    engine.executor.sees = lose_worker
    client = engine.client()
    for name, prompt in prompts.items():
        client.send(request(name, prompt, max_tokens=20))
    client.receive_until(lambda: len(client.ended) == len(prompts))
    reason, text = client.ended.pop("poison")
    assert reason is FinishReason.ERROR and "2 workers or engines in a row" in str(text)
    assert engine.executor.calls.count("repair") == 2
    for name in client.ended:
        assert client.tokens[name] == expected(request(name, prompts[name], max_tokens=20))
    client.wait_until_idle()


def test_an_unrecoverable_failure_stops_the_engine(harness) -> None:
    engine, _inbox_reader = harness
    engine.executor.repair_fails = True
    engine.executor.breaks_by = WorkerLost("worker 1 died")
    engine.client().send(request("r", [1]))
    engine.thread.join(HANG_S)
    assert isinstance(engine.failure, ExecutorError) and "no room" in str(engine.failure)


def test_a_worker_that_dies_in_an_idle_engine_is_replaced(harness) -> None:
    engine, inbox = harness
    inbox.until(EngineReport)

    def check() -> None:
        del engine.executor.check
        raise WorkerLost("worker 0 died")

    engine.executor.check = check
    assert inbox.until(Broken).repairing
    inbox.until(Repaired)
    client = engine.client()
    client.send(request("r", [1]))
    client.receive_until(lambda: bool(client.ended))
    assert client.tokens["r"] == expected(request("r", [1]))


def test_a_recovery_is_reported_even_when_the_groups_form_later(harness) -> None:
    """A recovery is reported even if the groups form later. Without `Repaired` the engine would
    stay marked as recovering and receive no requests."""
    engine, inbox = harness
    inbox.until(EngineReport)

    def regroup(groups: GroupPlan) -> list[Regrouped]:
        del engine.executor.regroup
        raise GroupBroken("a peer did not join")

    engine.executor.regroup = regroup
    engine.executor.breaks_by = WorkerLost("worker 1 died")
    engine.client().send(request("r", [1]))
    assert inbox.until(Broken).repairing and not inbox.until(Broken).repairing
    inbox.until(Repaired)
    assert engine.executor.calls == ("repair", "regroup")


@pytest.mark.parametrize("ranks", [[1], [0, 5]], ids=["leaves", "cannot form"])
def test_the_state_of_a_group_is_reported_at_once(lockstep_harness, ranks) -> None:
    """The state of a group is reported at once, not only with the next heartbeat: the previous
    heartbeat still has the old group."""
    engine, inbox = lockstep_harness
    inbox.until(EngineHello)
    inbox.inbox.send(inbox.peer, ReconfigureDistributedRequest(1, [0], 1))
    while inbox.until(EngineReport).wave_phase != Phase.PAUSED:
        """Skips reports from before the engine joined its first group and paused."""

    def regroup(groups: GroupPlan) -> list[Regrouped]:
        raise GroupBroken("a peer did not join", [1])

    engine.executor.regroup = regroup
    inbox.inbox.send(inbox.peer, ReconfigureDistributedRequest(2, ranks, 2))
    report = inbox.until(EngineReport)
    assert (report.epoch, report.wave_phase) == (2, Phase.FORMING if 0 in ranks else Phase.OUT)
    if 0 in ranks:
        assert inbox.until(Broken).absent == [ranks[1]], "the plan has indices"
        assert inbox.until(EngineReport).wave_phase == Phase.OUT


def test_requests_of_a_silent_client_are_dropped(harness_with_short_timeouts) -> None:
    """Requests of a silent client are aborted. The client is notified, in case it was only
    suspended; a client that sends messages keeps its requests."""
    engine, _inbox_reader = harness_with_short_timeouts
    silent, alive = engine.client(), engine.client()
    silent.send(request("silent", [1], max_tokens=LONG))
    alive.send(request("alive", [1], max_tokens=LONG))
    deadline = time.monotonic() + HANG_S
    while "silent" not in silent.ended:
        assert time.monotonic() < deadline
        alive.send(KeepAlive())
        alive.receive(0.05)
        silent.receive(0.0)
    assert silent.ended["silent"][0] == FinishReason.ABORT
    assert "alive" not in alive.ended
    assert list(engine.server.core.scheduler.requests) == ["alive"]


def test_a_recovery_longer_than_the_limit_drops_no_client_that_is_alive(
    harness_with_short_timeouts,
) -> None:
    engine, _inbox_reader = harness_with_short_timeouts
    client = engine.client()
    wanted = request("r", [1], max_tokens=300)
    client.send(wanted)
    client.receive_until(lambda: len(client.tokens.get("r", ())) > 3)
    engine.executor.repair_s = 1.3 * engine.config.cluster.stall_timeout_s
    engine.executor.breaks_by = WorkerLost("worker 1 died")
    while "r" not in client.ended:
        client.send(KeepAlive())
        client.receive(0.05)
    assert client.tokens["r"] == expected(wanted)


def test_messages_to_each_client_are_counted(harness) -> None:
    engine, _inbox_reader = harness
    for index in range(2):
        client = engine.client()
        client.send(request(f"r{index}", [1], max_tokens=5))
        client.receive_until(lambda client=client: bool(client.ended))
        assert client.seqs == list(range(1, len(client.seqs) + 1))


def test_a_paused_engine_keeps_requests_and_continues_after_the_pause(harness) -> None:
    engine, inbox = harness
    inbox.until(EngineHello)
    client = engine.client()
    engine.executor.step_s = 0.02
    client.send(request("r", [1], max_tokens=300))
    client.receive_until(lambda: bool(client.tokens))
    inbox.inbox.send(inbox.peer, Pause(0))
    inbox.until(Paused)
    engine.executor.step_s = 0.001
    steps = engine.server.core.num_steps
    client.send(request("late", [2]))
    while client.receive(0.2):
        pass
    assert engine.server.core.num_steps == steps and not client.ended
    inbox.inbox.send(inbox.peer, Resume(0))
    client.receive_until(lambda: len(client.ended) == 2)
    assert client.tokens["r"] == expected(request("r", [1], max_tokens=300))


def test_an_engine_introduces_itself_on_request(harness) -> None:
    engine, inbox = harness
    first = inbox.until(EngineHello)
    inbox.inbox.send(inbox.peer, Introduce())
    again = inbox.until(EngineHello)
    assert first.member == again.member == engine.server.member
    assert again.phase == Phase.RUNNING


def test_an_engine_in_a_long_step_still_sends_heartbeats(harness) -> None:
    """An engine in a long step still sends heartbeats: its loop is blocked, and the heartbeat
    thread reports the newest progress."""
    engine, inbox = harness
    begun, ends = threading.Event(), threading.Event()

    def hold(plan: SchedulerOutput) -> None:
        begun.set()
        ends.wait(HANG_S)

    client = engine.client()
    client.send(request("r", [1], max_tokens=LONG))
    while not inbox.until(EngineReport).running:
        pass
    engine.executor.sees = hold
    assert begun.wait(HANG_S)
    try:
        reports = [inbox.until(EngineReport) for _ in range(3)]
        while len({(report.running, report.steps) for report in reports[-3:]}) > 1:
            reports.append(inbox.until(EngineReport))
        assert reports[-1].running
    finally:
        ends.set()
