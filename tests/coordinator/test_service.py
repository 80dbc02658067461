"""The coordinator's loop over real channels: subscribers receive views soon, however busy it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import pytest

from swell.configs.schema import load
from swell.coordinator.manager_state import DesiredState, ManagerId, ManagerState, NotLeading
from swell.coordinator.roster import Roster
from swell.coordinator.service import CoordinatorService
from swell.coordinator.state_machine import CoordinatorStateMachine, recovery_s
from swell.coordinator.transport import channel
from swell.coordinator.transport.channel import ChannelAddress, Outlet, make_keys
from swell.coordinator.transport.codec import encode
from swell.coordinator.transport.coordinator_contact import CoordinatorEndpoint
from swell.coordinator.transport.runtime import ThreadRuntime
from swell.coordinator.wave_protocol.wave_interface import Phase
from swell.coordinator.wire import (
    ClusterReports,
    ClusterView,
    CoordinatorHeartbeat,
    EngineCommand,
    EngineHello,
    EngineLoads,
    EngineReport,
    IngressMessage,
    Introduce,
    Joined,
    OtherIngressCounts,
    Pause,
    Paused,
    ReconfigureDistributedRequest,
    Resume,
    Subscribe,
)
from tests.coordinator.test_roster import member
from tests.support.deadlines import HANG_S

CONFIG = load(
    {"model": {"path": "m"}, "cluster": {"load_report_s": 0.05, "heartbeat_s": 0.2}}
).cluster


@pytest.fixture
def service() -> Iterator[CoordinatorService]:
    others = threading.enumerate()  # a server of other tests may run in this process
    service = CoordinatorService(CONFIG)
    yield service
    service.stop()
    left = [thread.name for thread in threading.enumerate() if thread not in others]
    assert "swell-coordinator" not in left


def wait_until(service: CoordinatorService, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not is_so():
        assert time.monotonic() < deadline
        service.probe()


class Subscriber:
    """An ingress without engines, which tracks the view of the cluster."""

    def __init__(self, service: CoordinatorService) -> None:
        self._outlet: Outlet[IngressMessage] = Outlet(service.address, IngressMessage, service.keys)
        self.view = ClusterView(Roster())
        self.send, self.close = self._outlet.send, self._outlet.close

    def receive(self, timeout_s: float) -> ClusterView | None:
        """Returns the view after the next message; None if no message arrives or it does not belong
        to the known roster."""
        match self._outlet.receive(timeout_s):
            case ClusterView() as view:
                self.view = view
            case ClusterReports(epoch=epoch) as reports if epoch == self.view.roster.epoch:
                self.view = ClusterView(self.view.roster, reports)
            case EngineLoads(epoch=epoch, loads=loads) if epoch == self.view.roster.epoch:
                reports = self.view.reports.with_loads({load.rank: load for load in loads})
                self.view = ClusterView(self.view.roster, reports)
            case _:
                return None
        return self.view


@pytest.fixture
def connect(service: CoordinatorService) -> Iterator[Callable[[], Subscriber]]:
    outlets: list[Subscriber] = []

    def make() -> Subscriber:
        outlets.append(Subscriber(service))
        return outlets[-1]

    yield make
    for outlet in outlets:
        outlet.close()


def receive_view(outlet: Subscriber, wanted: Callable[[ClusterView], bool]) -> ClusterView:
    """Returns the first view that satisfies `wanted`."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        view = outlet.receive(0.5)
        if view is not None and wanted(view):
            return view
    raise AssertionError("no such view came")


def next_command(outlet: Outlet[EngineCommand]) -> EngineCommand | None:
    """Returns the next command that is not a heartbeat."""
    while isinstance(command := outlet.receive(HANG_S), CoordinatorHeartbeat):
        pass
    return command


def test_a_subscriber_receives_the_current_view_at_once(service, connect) -> None:
    service.join([member(0), member(1)], HANG_S)
    subscriber = connect()
    subscriber.send(Subscribe(0))
    view = receive_view(subscriber, lambda _view: True)
    assert view.roster.ranks == [0, 1] and view == service.view()


class OwnedByLoop:
    """A state machine that only the coordinator's thread may access."""

    def __init__(self, state_machine: CoordinatorStateMachine) -> None:
        vars(self)["inner"] = state_machine
        vars(self)["other_threads"] = []

    def __getattr__(self, name: str) -> object:
        if threading.current_thread().name != "swell-coordinator":
            self.other_threads.append(name)
        return getattr(self.inner, name)

    def __setattr__(self, name: str, value: object) -> None:
        getattr(self, name)
        setattr(self.inner, name, value)


def test_only_its_own_thread_accesses_the_state(service) -> None:
    owned = service._state_machine = OwnedByLoop(service._state_machine)
    service.join([member(0), member(1)], HANG_S)
    service.leave([1])
    service.cancel_leave([1])
    manager = ManagerId("manager")
    service.save_manager_state(ManagerState(DesiredState("manager"), phase="commit"))
    service.save_manager_state(ManagerState(DesiredState("another"), phase="drain"))
    assert service.membership().manager_state == ManagerState(
        DesiredState("manager"), phase="commit"
    )
    assert service.view().reports.phase == "commit"
    service.pause(manager)
    service.resume(manager)
    assert service.detach([1], HANG_S, manager).ranks == [0]
    assert service.remove_failed([7], manager).ranks == [0]
    assert service.wait(0, HANG_S).view == service.view()
    epoch = service.view().roster.epoch
    waiting = threading.Thread(target=service.wait, args=(epoch, HANG_S))
    waiting.start()
    service.remove_failed([0], manager)
    waiting.join(HANG_S / 2)
    assert not waiting.is_alive(), "a change of the roster ends the wait"
    assert owned.other_threads == []


def test_another_incarnation_of_a_rank_is_not_removed(service) -> None:
    numbers = {0: 5, 1: 6}
    members = [msgspec.structs.replace(member(r), incarnation=n) for r, n in numbers.items()]
    service.join(members, HANG_S)
    assert service.remove_failed([0, 1], incarnations=[4, 6]).ranks == [0]


def test_an_engine_replaces_an_earlier_one_of_its_rank_that_the_manager_names(service) -> None:
    earlier, later = (msgspec.structs.replace(member(0), incarnation=number) for number in (5, 6))
    service.join([earlier, member(1)], HANG_S)
    with pytest.raises(ValueError, match="rank 0 is already"):
        service.join([later], HANG_S, earlier=[4])
    assert service.view().roster.find(0) == earlier
    assert service.join([later], HANG_S, earlier=[5]).roster.members == (later, member(1))


@pytest.mark.parametrize("part", ["tick", "_reports"])
def test_a_failed_loop_stops_the_coordinator(monkeypatch, deaths, part) -> None:
    """A failure outside of any message terminates the coordinator; Ray starts another process."""

    def planted(*_args: object) -> None:
        raise ZeroDivisionError("planted")

    service = CoordinatorService(CONFIG)
    try:
        monkeypatch.setattr(service._state_machine, part, planted)
        deadline = time.monotonic() + HANG_S
        while not deaths:
            assert time.monotonic() < deadline, "the loop has ended and the process lives"
            time.sleep(0.005)
        [(loop, error)] = deaths
        assert loop == "coordinator" and isinstance(error, ZeroDivisionError)
        deaths.clear()
    finally:
        service.stop()


def test_a_failing_handler_does_not_stop_the_loop(service, connect, monkeypatch) -> None:
    subscriber, engine = connect(), connect()
    service.join([member(0)], HANG_S)
    subscriber.send(Subscribe(0))
    receive_view(subscriber, lambda _view: True)
    handle, failed = service._state_machine.on_message, []

    def once(message, now):
        if not failed:
            failed.append(message)
            raise ZeroDivisionError("planted")
        return handle(message, now)

    monkeypatch.setattr(service._state_machine, "on_message", once)
    engine.send(msgspec.Raw(b"\xc1"))
    for steps in (1, 2):
        engine.send(EngineReport(0, steps=steps))
    receive_view(subscriber, lambda view: [report.steps for report in view.reports.engines] == [2])
    assert failed == [EngineReport(0, steps=1)] and service._inbox.malformed == 1


class JumpingRuntime(ThreadRuntime):
    """Real time plus an offset that the test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.jumped_s = 0.0

    def now(self) -> float:
        return super().now() + self.jumped_s


def test_a_stalled_coordinator_keeps_its_subscribers() -> None:
    runtime = JumpingRuntime()
    service = CoordinatorService(CONFIG, runtime)
    subscriber = Subscriber(service)
    try:
        subscriber.send(Subscribe(0))
        receive_view(subscriber, lambda _view: True)
        runtime.jumped_s += 100.0
        service.join([member(0)], HANG_S)
        receive_view(subscriber, lambda view: view.roster.ranks == [0])
    finally:
        service.stop()
        subscriber.close()


def test_a_coordinator_forgets_engines_that_are_gone() -> None:
    """Connections and commands of engines that are gone are dropped. A member keeps its connection,
    also if the coordinator was stopped for a while."""
    runtime = JumpingRuntime()
    service = CoordinatorService(CONFIG, runtime)
    engine: Outlet[EngineCommand] = Outlet(service.address, EngineCommand, service.keys)
    stays, goes, unheard = member(0, incarnation=1), member(1, incarnation=2), member(2)

    try:
        for each in (stays, goes):
            engine.send(EngineHello(each))
        service.join([stays, unheard], HANG_S)
        wait_until(service, lambda: service._peers.keys() == {1, 2})
        service.pause(ManagerId())
        assert service._unsent.keys() == {unheard.incarnation}
        service.remove_failed([unheard.rank])
        runtime.jumped_s += 100.0
        wait_until(service, lambda: service._peers.keys() == {1} and not service._unsent)
    finally:
        engine.close()
        service.stop()


def test_a_successor_stopped_while_listening_listens_longer() -> None:
    """A new coordinator whose listening period has expired when it wakes up keeps listening,
    because it has not yet processed the messages of that time."""
    runtime = JumpingRuntime()
    service = CoordinatorService(CONFIG, runtime, recover=True)
    subscriber = Subscriber(service)
    engine: Outlet[EngineCommand] = Outlet(service.address, EngineCommand, service.keys)
    try:
        runtime.jumped_s += 100.0
        subscriber.send(Subscribe(0))
        while not service._subscribers:
            time.sleep(0.001)
        engine.send(EngineHello(member(0), 1, [0], 0, 0))
        assert service.view().roster.ranks == [0]
    finally:
        service.stop()
        subscriber.close()
        engine.close()


def test_a_successor_stopped_after_the_first_hello_listens_longer() -> None:
    """The first hello shortens the listening period to less than a quarter of the longest one."""
    runtime = JumpingRuntime()
    service = CoordinatorService(CONFIG, runtime, recover=True)
    subscriber = Subscriber(service)
    engines: list[Outlet[EngineCommand]] = [
        Outlet(service.address, EngineCommand, service.keys) for _ in range(2)
    ]
    try:
        engines[0].send(EngineHello(member(0), 1, [0], 0, 1))
        while not service._hellos:
            time.sleep(0.001)
        runtime.jumped_s += 100.0
        subscriber.send(Subscribe(0))
        while not service._subscribers:
            time.sleep(0.001)
        engines[1].send(EngineHello(member(1), 1, [1], 0, 1))
        assert service.view().roster.ranks == [0, 1]
    finally:
        service.stop()
        subscriber.close()
        for engine in engines:
            engine.close()


def test_a_roster_change_reaches_every_subscriber(service, connect) -> None:
    subscribers = [connect() for _ in range(3)]
    for index, subscriber in enumerate(subscribers):
        subscriber.send(Subscribe(index))
        receive_view(subscriber, lambda _view: True)
    for step in (
        lambda: service.join([member(0), member(1)], HANG_S).roster,
        lambda: service.leave([1]),
        lambda: service.remove_failed([1]),
    ):
        roster = step()
        for subscriber in subscribers:
            receive_view(subscriber, lambda view, roster=roster: view.roster == roster)


def test_a_report_reaches_the_subscribers(service, connect) -> None:
    service.join([member(0)], HANG_S)
    subscriber, engine = connect(), connect()
    subscriber.send(Subscribe(0))
    report = EngineReport(0, running=3, waiting=2, kv_usage=0.25, steps=7)
    engine.send(EngineReport(5, steps=1))
    engine.send(report)
    assert receive_view(subscriber, lambda view: bool(view.reports.engines)).reports.engines == [
        report
    ]


def test_each_ingress_receives_the_counts_of_all_others(service) -> None:
    def totals(index: int, *, total: float) -> dict[str, list[float]]:
        """Returns what ingress `index` receives after it has reported this total."""
        outlet: Outlet[IngressMessage] = Outlet(service.address, IngressMessage, service.keys)
        try:
            outlet.send(Subscribe(index, counts={"n": [total]}))
            deadline = time.monotonic() + HANG_S
            while time.monotonic() < deadline:
                message = outlet.receive(0.5)
                if isinstance(message, OtherIngressCounts):
                    return message.counts
            raise AssertionError("nothing was received")
        finally:
            outlet.close()

    assert totals(1, total=3) == {}
    assert totals(2, total=4) == {"n": [3.0]}
    assert totals(3, total=1) == {"n": [7.0]}
    assert totals(1, total=5) == {"n": [5.0]}
    assert totals(2, total=4) == {"n": [6.0]}


def test_without_subscription_nothing_is_sent(service, connect) -> None:
    engine, subscriber = connect(), connect()
    subscriber.send(Subscribe(0))
    engine.send(EngineReport(0))
    service.join([member(0)], HANG_S)
    receive_view(subscriber, lambda view: view.roster.ranks == [0])
    assert engine.receive(0.0) is None


def test_an_ingress_that_missed_a_roster_receives_it(service, connect) -> None:
    """An ingress that has missed a roster receives it: its next subscription says which roster it
    has."""
    subscriber = connect()
    subscriber.send(Subscribe(1))
    receive_view(subscriber, lambda _view: True)
    service.join([member(0)], HANG_S)
    current = receive_view(subscriber, lambda view: view.roster.ranks == [0])
    subscriber.view = ClusterView(Roster())  # as if the view had been lost
    subscriber.send(Subscribe(1, 0))
    assert receive_view(subscriber, lambda view: view.roster.epoch > 0).roster == current.roster


def test_a_publication_is_encoded_once_for_all(service, connect, monkeypatch) -> None:
    encoded: list[str] = []

    def counted(message: object) -> bytes:
        encoded.append(type(message).__name__)
        return encode(message)

    subscribers = [connect() for _ in range(5)]
    for number, subscriber in enumerate(subscribers):
        subscriber.send(Subscribe(number))
        receive_view(subscriber, lambda _view: True)
    monkeypatch.setattr(channel, "encode", counted)
    service.join([member(0)], HANG_S)
    for subscriber in subscribers:
        receive_view(subscriber, lambda view: view.roster.ranks == [0])
    assert encoded.count("ClusterView") == 1


def test_heartbeats_are_sent_without_changes(service, connect) -> None:
    subscriber = connect()
    subscriber.send(Subscribe(0))
    first = receive_view(subscriber, lambda _view: True)
    assert [receive_view(subscriber, lambda _view: True) for _ in range(3)] == [first] * 3


def test_continuous_reports_do_not_hold_views_back(service, connect) -> None:
    """Views are published while an engine reports continuously."""
    service.join([member(0)], HANG_S)
    subscriber = connect()
    subscriber.send(Subscribe(0))
    quiet = threading.Event()

    def talk() -> None:
        engine = connect()
        steps = 0
        while not quiet.is_set():
            steps += 1
            engine.send(EngineReport(0, steps=steps))
            if steps % 50 == 0:
                time.sleep(0.001)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        seen: list[int] = []
        end = time.monotonic() + HANG_S
        while len(set(seen)) < 4 and time.monotonic() < end:
            view = subscriber.receive(0.1)
            seen += [report.steps for report in view.reports.engines] if view else []
    finally:
        quiet.set()
        thread.join()
    assert len(set(seen)) >= 4, "views did not come while engines talked"
    assert seen == sorted(seen)


def test_garbage_and_gone_subscribers_are_ignored(service, connect) -> None:
    gone = Subscriber(service)
    gone.send(Subscribe(9))
    receive_view(gone, lambda _view: True)
    gone.close()
    subscriber = connect()
    for nonsense in (b"", b"\x93\x01\xa1\xff", b"\x91\x63", b"\xc1"):
        subscriber.send(msgspec.Raw(nonsense))
    subscriber.send(Subscribe(0))
    service.join([member(0)], HANG_S)
    assert receive_view(subscriber, lambda view: view.roster.epoch == 1)


def test_a_malformed_message_is_dropped(service, connect) -> None:
    service.join([member(0)], HANG_S)
    engine, subscriber = connect(), connect()
    engine.send(EngineReport(0, wave_phase=99))
    engine.send(EngineReport(0, steps=5))
    subscriber.send(Subscribe(0))
    receive_view(subscriber, lambda view: [report.steps for report in view.reports.engines] == [5])


def test_commands_reach_the_current_engine_of_a_rank(connect_to) -> None:
    """Commands go to the engine that has the rank now. Its predecessor sent messages first, and the
    engine has not introduced itself yet when it joins."""
    service, connect = connect_to
    joins: list[threading.Thread] = []
    for incarnation in (1, 2):
        engine = msgspec.structs.replace(member(0), incarnation=incarnation)
        joins.append(threading.Thread(target=service.join, args=([engine], HANG_S)))
        outlet = connect()
        if incarnation == 1:
            outlet.send(EngineHello(engine))
        joins[-1].start()
        while 0 not in service._state_machine.joining:
            time.sleep(0.001)
        outlet.send(EngineHello(engine))
        command = next_command(outlet)
        assert isinstance(command, ReconfigureDistributedRequest), command
        outlet.send(Joined(0, incarnation, command.epoch))
        assert isinstance(next_command(outlet), Resume)
        joins[-1].join(HANG_S)
        assert service.view().roster.ranks == [0]
        service.remove_failed([0])


def test_an_engine_that_has_introduced_itself_to_a_predecessor_does_so_again(connect_to) -> None:
    """An engine that was stopped while a new coordinator listened introduces itself again; the
    coordinator does not know the epoch of its group."""
    service, connect = connect_to
    engine, outlet = member(0), connect()
    joining = threading.Thread(target=service.join, args=([engine], HANG_S))
    joining.start()
    while 0 not in service._state_machine.joining:
        time.sleep(0.001)
    stopped = int(Phase.STOPPED)
    outlet.send(EngineReport(0, engine.incarnation, epoch=5, wave_phase=stopped))
    assert isinstance(next_command(outlet), Introduce)
    outlet.send(EngineHello(engine, epoch=5, ranks=[0], phase=stopped))
    while not (isinstance(command := next_command(outlet), ReconfigureDistributedRequest)):
        assert command is not None, "no group was formed"
    assert command.epoch > 5
    outlet.send(Joined(0, engine.incarnation, command.epoch))
    joining.join(HANG_S)
    assert service.view().roster.ranks == [0]


def test_an_engine_that_reports_before_its_hello_is_requested_to_send_it(connect_to) -> None:
    """The others step until the engine has introduced itself. The epoch of their group is newer
    than its own, although nothing was sent to it yet."""
    service, connect = connect_to
    first, others = member(1), connect()
    others.send(EngineHello(first))
    joining = threading.Thread(target=service.join, args=([first], HANG_S))
    joining.start()
    command = next_command(others)
    assert isinstance(command, ReconfigureDistributedRequest)
    others.send(Joined(1, first.incarnation, command.epoch))
    assert isinstance(next_command(others), Resume)
    joining.join(HANG_S)
    late, outlet = msgspec.structs.replace(member(0), incarnation=2), connect()
    joining = threading.Thread(target=service.join, args=([late], HANG_S))
    joining.start()
    while 0 not in service._state_machine.joining:
        time.sleep(0.001)
    stopped = int(Phase.STOPPED)
    outlet.send(EngineReport(0, late.incarnation, epoch=5, wave_phase=stopped))
    assert isinstance(next_command(outlet), Introduce)
    assert service._state_machine.is_stable
    outlet.send(EngineHello(late, epoch=5, ranks=[0], phase=stopped))
    pause = next_command(others)
    assert isinstance(pause, Pause)
    others.send(Paused(1, first.incarnation, pause.epoch, pause.number))
    while not isinstance(command := next_command(outlet), ReconfigureDistributedRequest) or (
        command.epoch <= 5
    ):
        assert command is not None, "it follows no group"
    for each, engine in ((outlet, late), (others, first)):
        each.send(Joined(engine.rank, engine.incarnation, command.epoch))
    joining.join(HANG_S)
    assert service.view().roster.ranks == [0, 1]


def test_an_engine_that_was_removed_learns_it_from_the_answer_to_its_report(connect_to) -> None:
    """The engine was removed as silent: its connection was lost with the command to leave the
    group."""
    service, connect = connect_to
    engines = [msgspec.structs.replace(member(rank), incarnation=1 + rank) for rank in (0, 1)]
    outlets = [connect() for _ in engines]
    for engine, outlet in zip(engines, outlets, strict=True):
        outlet.send(EngineHello(engine))
    wait_until(service, lambda: len(service._peers) == len(engines))
    joining = threading.Thread(target=service.join, args=(engines, HANG_S))
    joining.start()
    for engine, outlet in zip(engines, outlets, strict=True):
        command = next_command(outlet)
        assert isinstance(command, ReconfigureDistributedRequest)
        outlet.send(Joined(engine.rank, engine.incarnation, command.epoch))
    joining.join(HANG_S)
    service.remove_failed([1])
    again, stopped = connect(), int(Phase.STOPPED)
    again.send(EngineReport(1, engines[1].incarnation, epoch=command.epoch, wave_phase=stopped))
    answer = next_command(again)
    assert isinstance(answer, ReconfigureDistributedRequest), answer
    assert answer.epoch > command.epoch and answer.ranks == []


@pytest.fixture
def connect_to() -> Iterator[tuple[CoordinatorService, Callable[[], Outlet[EngineCommand]]]]:
    """Yields a coordinator of engines that share experts, and a function that connects one of
    them."""
    service = CoordinatorService(CONFIG, lockstep=True)
    outlets: list[Outlet[EngineCommand]] = []

    def make() -> Outlet[EngineCommand]:
        outlets.append(Outlet(service.address, EngineCommand, service.keys))
        return outlets[-1]

    yield service, make
    for outlet in outlets:
        outlet.close()
    service.stop()


def test_the_managers_state_survives_manager_and_coordinator(service) -> None:
    """The manager's state outlives the manager and the coordinator: an engine keeps the newest
    state, and reports which manager led and what it wanted."""
    newest = ManagerState(DesiredState("new", target=3, pause_requested=True, term=2, number=7))
    older = ManagerState(DesiredState("old", target=1, term=1, number=9))
    engines: list[Outlet[EngineCommand]] = []
    for rank, state in enumerate((older, newest, older)):
        engines.append(Outlet(service.address, EngineCommand, service.keys))
        engines[-1].send(EngineHello(member(rank), roster_epoch=5, manager_state=state))
    deadline = time.monotonic() + HANG_S
    while service.membership().manager_state != newest or service.view().roster.epoch <= 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    told = [engine.receive(HANG_S) for engine in engines]
    assert all(isinstance(each, CoordinatorHeartbeat) for each in told)
    assert service.save_manager_state(older) == newest
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    "command",
    [
        lambda service, manager: service.pause(manager),
        lambda service, manager: service.join([member(1)], HANG_S, manager),
        lambda service, manager: service.leave([0], manager),
        lambda service, manager: service.detach([0], HANG_S, manager),
        lambda service, manager: service.remove_failed([0], manager),
    ],
)
def test_a_manager_that_no_longer_leads_changes_nothing(service, command) -> None:
    service.join([member(0)], HANG_S)
    first, second = (
        ManagerState(DesiredState("first", term=1)),
        ManagerState(DesiredState("second", term=2)),
    )
    service.save_manager_state(first)
    service.save_manager_state(second)
    before = service.view()
    with pytest.raises(NotLeading):
        command(service, first.manager_id)
    assert service.view() == before
    command(service, second.manager_id)
    assert service.view() != before


def test_a_kept_leaving_engine_is_not_removed_at_its_deadline() -> None:
    runtime = JumpingRuntime()
    service = CoordinatorService(CONFIG, runtime, lockstep=True)
    machine = service._state_machine
    machine.join([member(0), member(1)], 0.0)
    for rank in (0, 1):
        machine.on_message(Joined(rank, member(rank).incarnation, machine.waves.epoch), 0.0)
    try:
        assert service.view().roster.ranks == [0, 1]
        going = threading.Thread(target=service.detach, args=([1], 100.0, ManagerId()))
        going.start()
        while not machine.detached:
            time.sleep(0.005)
        assert service.cancel_leave([1]).ranks == [0, 1]
        going.join(HANG_S)
        runtime.jumped_s += 200.0
        assert not going.is_alive()
        assert service.view().roster.ranks == [0, 1]
    finally:
        service.stop()


def test_an_engine_that_was_idle_only_under_an_earlier_roster_stays(service) -> None:
    """An engine that was idle under an earlier roster is not detached: a request may have moved to
    it since."""
    service.join([member(0), member(1)], HANG_S)
    idle_epoch = service.leave([1]).epoch
    service.leave([0])
    before = service.view().roster
    assert before.epoch > idle_epoch
    assert service.detach([1], HANG_S, ManagerId(), idle_epoch) == before
    assert service.view().roster == before
    assert service.detach([1], HANG_S, ManagerId(), before.epoch).ranks == [0]


def test_a_coordinator_on_another_host_listens_until_its_peers_detected_the_loss() -> None:
    keys = make_keys()
    here = CoordinatorEndpoint(keys, host="127.0.0.1")
    elsewhere = CoordinatorEndpoint(keys, host="192.0.2.1", port=1234)
    assert not elsewhere.is_at(ChannelAddress("machine", "ipc", "tcp://127.0.0.1:1234"))
    assert elsewhere.is_at(ChannelAddress("machine", "ipc", "tcp://192.0.2.1:1234"))
    assert CoordinatorEndpoint(keys).is_at(ChannelAddress("machine", "ipc", "tcp://a:1"))
    moved = CoordinatorService(CONFIG, endpoint=here, recover=True)
    try:
        assert moved._recovery_s > CONFIG.stall_timeout_s
        assert moved.probe(), "it answers while it listens"
        engine = Outlet(moved.address, EngineCommand, moved.keys)
        engine.send(EngineHello(member(0), roster_epoch=5))
        assert moved.view().roster.ranks == [0]
        assert moved._recovery_s < CONFIG.stall_timeout_s / 2, "it was found: all look for it"
        engine.close()
    finally:
        moved.stop()


def test_a_newcomer_does_not_shorten_the_search_of_the_others() -> None:
    """Engines of the predecessor look for the new address only once they have noticed the silence
    of the old one. They must still be heard, although a newcomer has had it from its start."""
    elsewhere = CoordinatorEndpoint(make_keys(), host="127.0.0.1")
    moved = CoordinatorService(CONFIG, endpoint=elsewhere, recover=True)
    engines: list[Outlet[EngineCommand]] = [
        Outlet(moved.address, EngineCommand, moved.keys) for _ in range(2)
    ]
    try:
        engines[0].send(EngineHello(member(1)))
        wait_until(moved, lambda: 1 in moved._hellos)
        assert moved._recovery_s > CONFIG.stall_timeout_s
        engines[1].send(EngineHello(member(0), roster_epoch=5))
        assert moved.view().roster.ranks == [0, 1]
        assert moved._recovery_s < CONFIG.stall_timeout_s / 2, "it was found: all look for it"
    finally:
        for engine in engines:
            engine.close()
        moved.stop()


def test_a_successor_listens_for_the_expected_time() -> None:
    soon_s = 1.0 + CONFIG.heartbeat_s
    limit_s = soon_s + CONFIG.stall_timeout_s
    heard = partial(recovery_s, CONFIG)
    assert heard(0.2, has_moved=False) == soon_s, "peers are where they were"
    assert heard(None, has_moved=False) == limit_s, "the predecessor may have been elsewhere"
    late_s = soon_s + 0.5
    assert late_s < heard(late_s, has_moved=False) < limit_s, "all others look for it, too"
    assert heard(0.2, has_moved=True) == 0.2 + soon_s + CONFIG.heartbeat_s
    assert heard(limit_s, has_moved=True) == limit_s
