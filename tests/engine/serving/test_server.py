"""An engine and its channel: real sockets, a real loop on a thread, a worker without tensors."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from swell.configs.schema import Config, load
from swell.coordinator.service import CoordinatorService
from swell.coordinator.transport.channel import (
    ChannelAddress,
    ChannelKeys,
    Inbox,
    Outlet,
    make_keys,
)
from swell.coordinator.wire import ClusterView, CoordinatorMessage, EngineReport, Subscribe
from swell.engine.core import EngineCore
from swell.engine.executor import ExecutorError, ExecutorLimits
from swell.engine.serving.engine_report import LoadReporter
from swell.engine.serving.server import EngineServer
from swell.engine.wire import (
    AbortRequests,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    KeepAlive,
    UtilityCall,
    UtilityOutput,
)
from swell.worker.wire import (
    AsyncModelRunnerOutput,
    ModelRunnerOutput,
    SamplerParams,
    SchedulerOutput,
)
from tests.engine.executor.fake_worker import VOCAB, FakeExecutor, expected
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow


LONG = 20_000
"""The number of tokens of a request that does not finish within a test."""

NUM_BLOCKS = 2 * LONG // 4 + 1


class StepExecutor(FakeExecutor):
    """A device that takes some time for each step, can fail, and records its shutdown."""

    step_s = 0.001
    fails = False
    ended = False

    def execute(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        if self.fails:
            raise ExecutorError("worker 0 was lost")
        return super().execute(plan)

    def run_until(self, step: int) -> ModelRunnerOutput:
        time.sleep(self.step_s)
        return super().run_until(step)

    def shutdown(self) -> None:
        self.ended = True


class Engine:
    """One engine on a thread, with a given coordinator."""

    def __init__(
        self,
        keys: ChannelKeys,
        coordinator: ChannelAddress,
        kind: type[StepExecutor] = StepExecutor,
        **cluster: float,
    ) -> None:
        self.config = config = _config(**cluster)
        self.executor = kind(NUM_BLOCKS, config.cache.block_tokens)
        core = EngineCore(config, self.executor, ExecutorLimits(NUM_BLOCKS, 2 * LONG, VOCAB))
        self.server = EngineServer(config, 0, core, keys, coordinator)
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="engine")
        self._keys = keys
        self._clients: list[Outlet[EngineCoreOutputs]] = []
        self.begun = time.monotonic()
        self.thread.start()

    def _run(self) -> None:
        try:
            self.server.run()
        except ExecutorError as error:
            self.failure = error

    def client(self) -> Client:
        outlet = Outlet(self.server.address, EngineCoreOutputs, self._keys)
        self._clients.append(outlet)
        return Client(outlet)

    def close(self) -> None:
        self.server.stop()
        self.thread.join(HANG_S)
        for outlet in self._clients:
            outlet.close()
        assert not self.thread.is_alive()


class Client:
    """An ingress from the engine's point of view."""

    def __init__(self, outlet: Outlet[EngineCoreOutputs]) -> None:
        self._outlet = outlet
        self._calls = 0
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, tuple[FinishReason, object]] = {}
        self.answers: dict[int, UtilityOutput] = {}
        self.seqs: list[int] = []
        self.started: list[str] = []

    def send(self, message: object) -> None:
        self._outlet.send(message)

    def receive(self, timeout_s: float = 0.5) -> bool:
        """Receives one message; returns False if none arrived."""
        message = self._outlet.receive(timeout_s)
        if message is None:
            return False
        self.seqs += [message.seq] if message.outputs or message.started else []
        self.started += message.started
        for output in message.outputs:
            assert output.request_id not in self.ended, "an output after the last one"
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ended[output.request_id] = (output.finish_reason, output.stop_reason)
        if message.utility_output is not None:
            assert message.utility_output.call_id not in self.answers
            self.answers[message.utility_output.call_id] = message.utility_output
        return True

    def receive_until(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HANG_S
        while not there():
            assert time.monotonic() < deadline, "the engine did not answer"
            self.receive()

    def call(self, method: str, *args: object) -> UtilityOutput:
        self._calls += 1
        self.send(UtilityCall(self._calls, method, list(args)))
        self.receive_until(lambda: self._calls in self.answers)
        return self.answers[self._calls]

    def wait_until_idle(self) -> None:
        """Waits until every block and slot is free."""
        deadline = time.monotonic() + HANG_S
        while self.call("check_idle").failure_message is not None:
            assert time.monotonic() < deadline, "a block or slot is still held"
            time.sleep(0.005)


def _config(**cluster: float) -> Config:
    return load(
        {
            "model": {"path": "none"},
            "cache": {"block_tokens": 4},
            "scheduler": {"max_rows": 8},
            "cluster": {"load_report_s": 0.02, "heartbeat_s": 0.2, **cluster},
        }
    )


def request(name: str, prompt: list[int], max_tokens: int = 8, seed: int = 0) -> EngineCoreRequest:
    return EngineCoreRequest(name, prompt, SamplerParams(seed=seed), max_tokens=max_tokens)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def check_closed(before: int) -> None:
    """Asserts that no more files are open than before; the far end of a socket closes a little
    later."""
    deadline = time.monotonic() + HANG_S
    while open_files() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_files() <= before, "a socket was left open"


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    files, threads = open_files(), threading.active_count()
    yield
    deadline = time.monotonic() + HANG_S
    while threading.active_count() > threads:  # an authenticator stops just after its inbox
        assert time.monotonic() < deadline, "a thread was left"
        time.sleep(0.01)
    check_closed(files)


@pytest.fixture(scope="module")
def keys() -> ChannelKeys:
    return make_keys()


@pytest.fixture
def coordinator(keys) -> Iterator[Inbox[CoordinatorMessage]]:
    """Yields an inbox that receives the engine's reports and sends nothing."""
    inbox: Inbox[CoordinatorMessage] = Inbox(CoordinatorMessage, keys)
    yield inbox
    inbox.close()


@pytest.fixture
def engine(keys, coordinator) -> Iterator[Engine]:
    engine = Engine(keys, coordinator.address)
    yield engine
    engine.close()


# -------------------------------------------------------------------------------- requests


def test_requests_are_answered_with_their_own_tokens(engine) -> None:
    client = engine.client()
    requests = [request(f"r{i}", [1, 2, i], max_tokens=6 + i, seed=i) for i in range(12)]
    for wanted in requests:
        client.send(wanted)
    client.receive_until(lambda: len(client.ended) == len(requests))
    assert client.tokens == {r.request_id: expected(r) for r in requests}
    assert set(client.ended.values()) == {(FinishReason.LENGTH, None)}
    client.wait_until_idle()


def test_answers_of_two_clients_are_not_mixed(engine) -> None:
    clients = [engine.client(), engine.client()]
    requests = [[request(f"c{c}-{i}", [c, i], seed=c) for i in range(6)] for c in (0, 1)]
    for pair in zip(*requests, strict=True):
        for client, wanted in zip(clients, pair, strict=True):
            client.send(wanted)
    for client, wanted in zip(clients, requests, strict=True):
        client.receive_until(lambda client=client, wanted=wanted: len(client.ended) == len(wanted))
        assert client.tokens == {r.request_id: expected(r) for r in wanted}
        assert not client.receive(0.0)


def test_an_abort_frees_everything_and_ends_the_outputs(engine) -> None:
    client = engine.client()
    client.send(request("long", [1, 2, 3], max_tokens=LONG))
    client.send(request("other", [4, 5], max_tokens=60))
    client.receive_until(lambda: len(client.tokens.get("long", [])) >= 5)
    client.send(AbortRequests(["long", "unknown"]))
    client.call("report")
    count = len(client.tokens["long"])
    client.receive_until(lambda: "other" in client.ended)
    assert client.tokens["other"] == expected(request("other", [4, 5], max_tokens=60))
    client.wait_until_idle()
    assert len(client.tokens["long"]) == count and "long" not in client.ended


def test_a_duplicate_id_is_refused_and_the_first_request_continues(engine) -> None:
    first, second = engine.client(), engine.client()
    wanted = request("same", [1, 2, 3], max_tokens=200)
    engine.executor.step_s = 0.02
    first.send(wanted)
    first.receive_until(lambda: bool(first.tokens))
    second.send(request("same", [9], max_tokens=2))
    second.receive_until(lambda: bool(second.ended))
    reason, text = second.ended["same"]
    assert reason is FinishReason.ERROR and "'same' is already being served" in text
    assert second.tokens == {"same": []}
    engine.executor.step_s = StepExecutor.step_s
    first.receive_until(lambda: bool(first.ended))
    assert first.tokens["same"] == expected(wanted)


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (request("bad", []), "has no tokens"),
        (request("bad", [1], max_tokens=3 * LONG), f"maximum context length of {2 * LONG}"),
    ],
)
def test_a_request_that_can_never_run_is_answered_at_once(engine, wanted, text) -> None:
    client = engine.client()
    client.send(wanted)
    client.receive_until(lambda: bool(client.ended))
    assert client.ended["bad"][0] is FinishReason.ERROR and text in client.ended["bad"][1]
    client.wait_until_idle()


@pytest.mark.parametrize("leaks", [False, True])
def test_an_idle_engine_reports_leaked_blocks_and_slots(engine, leaks) -> None:
    """An idle engine reports leaked blocks and slots, with the production check: after the last
    request and not before."""
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign]
    logger = logging.getLogger("swell.engine")
    logger.addHandler(handler)
    if leaks:
        engine.server.core.scheduler.kv.pool.allocate(1)
    client = engine.client()
    try:
        for index in range(4):
            client.send(request(f"r{index}", [1, index], max_tokens=4))
        client.receive_until(lambda: len(client.ended) == 4)
        client.call("report")
    finally:
        logger.removeHandler(handler)
    assert bool(lines) is leaks and all("idle" in line.getMessage() for line in lines)


def test_an_id_can_be_used_again(engine) -> None:
    for seed in (0, 1):
        client = engine.client()
        client.send(request("again", [1], seed=seed))
        client.receive_until(lambda client=client: bool(client.ended))
        assert client.tokens["again"] == expected(request("again", [1], seed=seed))


def test_malformed_messages_and_keep_alives_change_nothing(engine) -> None:
    client = engine.client()
    client.send(msgspec.Raw(b"\xc1"))
    client.send(msgspec.Raw(b"\x92\x01\x91\xa1\xff"))
    client.send(["unknown"])
    client.send(KeepAlive())
    client.send(request("fine", [1]))
    client.receive_until(lambda: bool(client.ended))
    assert client.tokens["fine"] == expected(request("fine", [1]))


def test_a_client_that_has_left_does_not_stop_the_others(engine) -> None:
    gone = Outlet(engine.server.address, EngineCoreOutputs, engine._keys)
    gone.send(request("gone", [1], max_tokens=50))
    gone.close()
    client = engine.client()
    client.send(request("here", [2], max_tokens=50))
    client.receive_until(lambda: bool(client.ended))
    client.wait_until_idle()


# -------------------------------------------------------------------------------- services


def test_an_unknown_service_is_answered_with_the_known_ones(engine) -> None:
    failure = engine.client().call("nonsense").failure_message
    assert "ValueError" in failure and "'nonsense'" in failure
    assert "check_idle" in failure and "report" in failure


def test_an_exception_of_a_service_is_returned_to_its_caller(engine) -> None:
    client = engine.client()
    client.send(request("long", [1], max_tokens=LONG))
    client.receive_until(lambda: bool(client.tokens))
    assert client.call("check_idle").failure_message.startswith("AssertionError")
    assert client.call("report", 1, 2).failure_message.startswith("TypeError")
    client.send(AbortRequests(["long"]))
    client.wait_until_idle()


def test_a_report_can_be_requested(engine) -> None:
    client = engine.client()
    client.send(request("long", [1, 2, 3], max_tokens=LONG))
    client.receive_until(lambda: bool(client.tokens))
    answer = client.call("report")
    assert answer.failure_message is None
    report = msgspec.msgpack.decode(answer.result, type=EngineReport)
    assert (report.rank, report.running, report.waiting) == (0, 1, 0)
    assert report.steps >= 1 and 0 < report.kv_usage < 1
    client.send(AbortRequests(["long"]))


def test_calls_of_two_clients_with_one_id_are_not_mixed(engine) -> None:
    clients = [engine.client(), engine.client()]
    clients[0].send(UtilityCall(1, "report"))
    clients[1].send(UtilityCall(1, "nonsense"))
    for client in clients:
        client.receive_until(lambda client=client: bool(client.answers))
    assert clients[0].answers[1].failure_message is None
    assert clients[1].answers[1].failure_message is not None


# -------------------------------------------------------------------------------- load reports


class Reports:
    """Collects the engine's reports to this coordinator."""

    def __init__(self, inbox: Inbox[CoordinatorMessage]) -> None:
        self._inbox = inbox
        self.received: list[EngineReport] = []

    def take(self, is_enough: Callable[[], object]) -> None:
        """Receives reports until there are enough."""
        deadline = time.monotonic() + HANG_S
        while not is_enough():
            assert time.monotonic() < deadline, "the engine does not report"
            taken = [message for _, message in self._inbox.receive(0.02)]
            self.received += [one for one in taken if isinstance(one, EngineReport)]


def test_an_idle_engine_sends_only_heartbeats(engine, coordinator) -> None:
    reports = Reports(coordinator)
    reports.take(lambda: len(reports.received) >= 6)
    assert set(reports.received[1:]) == {reports.received[-1]}
    most = 3 * (time.monotonic() - engine.begun) / engine.config.cluster.heartbeat_s
    assert len(reports.received) <= most + 3


def test_a_busy_engine_reports_by_interval_and_not_on_every_step(engine, coordinator) -> None:
    client, reports = engine.client(), Reports(coordinator)
    client.send(request("long", [1], max_tokens=LONG))
    client.receive_until(lambda: bool(client.tokens))
    reports.take(lambda: len({report.steps for report in reports.received}) > 8)
    elapsed_s = time.monotonic() - engine.begun
    assert len(reports.received) <= 3 * elapsed_s / engine.config.cluster.load_report_s + 3
    steps = [report.steps for report in reports.received]
    assert steps == sorted(steps)
    client.send(AbortRequests(["long"]))
    client.wait_until_idle()
    reports.take(lambda: reports.received[-1].running == 0)


def test_reports_reach_a_coordinator_while_traffic_never_stops() -> None:
    """Reports reach a coordinator while requests arrive without a pause, over the whole path:
    engine, coordinator, subscriber."""
    service = CoordinatorService(_config().cluster)
    engine = Engine(service.keys, service.address)
    watcher = Outlet(service.address, ClusterView, service.keys)
    quiet = threading.Event()

    def send_requests() -> None:
        client, index = engine.client(), 0
        while not quiet.is_set():
            client.send(request(f"r{index}", [1, index % 7], max_tokens=3))
            index += 1
            client.receive(0.0)
            time.sleep(0.0005)

    service.join([engine.server.member], HANG_S)
    thread = threading.Thread(target=send_requests)
    thread.start()
    try:
        steps_seen = [0]
        deadline = time.monotonic() + HANG_S
        while len(steps_seen) <= 20:
            assert time.monotonic() < deadline, f"reports stopped: {steps_seen}"
            watcher.send(Subscribe(0))  # a client that is silent for several heartbeats is dropped
            view = watcher.receive(0.1)
            steps = max((report.steps for report in view.reports.engines), default=0) if view else 0
            if steps > steps_seen[-1]:
                steps_seen.append(steps)
    finally:
        quiet.set()
        thread.join()
        engine.close()
        watcher.close()
        service.stop()


def test_a_reporter_keeps_its_deadline() -> None:
    """A reporter reports by its deadline under constant changes; the clock is scripted."""
    reporter = LoadReporter(_config(load_report_s=0.0625, heartbeat_s=1.0).cluster)
    times = []
    for tick in range(64 * 4):  # four seconds, with a change in every tick of the second and third
        now = tick / 64
        if 1 <= now < 3:
            reporter.changed()
        if reporter.wait_s(now) == 0.0:
            reporter.reported(now)
            times.append(now)
    assert times[:2] == [0.0, 1.0]
    assert times[2:34] == [1 + i / 16 for i in range(1, 33)], "a deadline was pushed back"
    assert times[34:] == []
    assert reporter.wait_s(3.5) == 0.5


def test_a_coordinator_of_many_engines_requests_fewer_reports() -> None:
    reporter = LoadReporter(_config(load_report_s=0.0625, heartbeat_s=1.0).cluster)
    reporter.reported(0.0)
    reporter.changed()
    assert reporter.wait_s(0.0) == 0.0625
    assert reporter.wait_s(0.0, 0.25) == 0.25
    assert reporter.wait_s(0.0, 9.0) == 1.0, "a heartbeat is not delayed"


# -------------------------------------------------------------------------------- termination


@pytest.mark.parametrize("busy", [False, True])
def test_stop_ends_the_loop_and_closes_everything(keys, coordinator, busy) -> None:
    before = open_files()
    engine = Engine(keys, coordinator.address)
    client = engine.client()
    if busy:
        client.send(request("long", [1], max_tokens=LONG))
        client.receive_until(lambda: bool(client.tokens))
    engine.close()
    assert engine.failure is None and engine.executor.ended
    check_closed(before)


def test_a_failure_of_the_executor_is_raised_and_closes_everything(keys, coordinator) -> None:
    before = open_files()
    engine = Engine(keys, coordinator.address)
    engine.executor.fails = True
    engine.client().send(request("r", [1]))
    engine.thread.join(HANG_S)
    assert isinstance(engine.failure, ExecutorError) and engine.executor.ended
    engine.close()
    check_closed(before)


@pytest.mark.parametrize("first", [True, False])
def test_requests_in_a_step_are_announced_before_it(keys, coordinator, first) -> None:
    """Requests in a step are announced before it, also for the step in which the engine dies, even
    the first one. So clients know which requests were in it and which were waiting."""
    engine = Engine(keys, coordinator.address)
    client = engine.client()
    try:
        engine.executor.fails = first
        for i in range(12):
            client.send(request(f"r{i}", [1], max_tokens=LONG))
        if not first:
            client.receive_until(lambda: len(client.started) == 8)
            client.send(AbortRequests(client.started[:3]))
            client.receive_until(lambda: len(client.started) == 11)
            engine.executor.fails = True
        engine.thread.join(HANG_S)
        assert isinstance(engine.failure, ExecutorError)
        requests = engine.server.core.scheduler.requests
        computed = {name for name, one in requests.items() if one.tokens_at_start}
        ended = 0 if first else 3
        client.receive_until(lambda: len(client.started) >= ended + len(computed))
        while client.receive(0.2):
            pass
        assert computed == set(client.started[ended:])
        assert client.seqs == list(range(1, len(client.seqs) + 1))
    finally:
        engine.close()
