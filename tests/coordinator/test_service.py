"""The coordinator's loop over real channels: who watches hears, soon and however busy it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from swell.configs.schema import load
from swell.coordinator.channel import Outlet
from swell.coordinator.service import CoordinatorService
from swell.coordinator.wire import (
    ClusterView,
    EngineCommand,
    EngineHello,
    EngineReport,
    IngressWord,
    Joined,
    OthersCounts,
    ReconfigureDistributedRequest,
    Resume,
    Watch,
)
from tests.coordinator.test_roster import member

SOON_S = 10.0

CONFIG = load(
    {"model": {"path": "m"}, "cluster": {"load_report_s": 0.05, "heartbeat_s": 0.2}}
).cluster


@pytest.fixture
def service() -> Iterator[CoordinatorService]:
    service = CoordinatorService(CONFIG)
    yield service
    service.stop()
    assert "swell-coordinator" not in [thread.name for thread in threading.enumerate()]


@pytest.fixture
def connect(service: CoordinatorService) -> Iterator[Callable[[], Outlet[ClusterView]]]:
    outlets: list[Outlet[ClusterView]] = []

    def make() -> Outlet[ClusterView]:
        outlets.append(Outlet(service.address, ClusterView, service.keys))
        return outlets[-1]

    yield make
    for outlet in outlets:
        outlet.close()


def hear(outlet: Outlet[ClusterView], wanted: Callable[[ClusterView], bool]) -> ClusterView:
    """The first view that is as wanted."""
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        view = outlet.receive(0.5)
        if view is not None and wanted(view):
            return view
    raise AssertionError("no such view came")


def test_a_watcher_hears_at_once_what_is_known(service, connect) -> None:
    service.join([member(0), member(1)], SOON_S)
    watcher = connect()
    watcher.send(Watch(0))
    view = hear(watcher, lambda _view: True)
    assert view.roster.ranks == [0, 1] and view == service.view()


@pytest.mark.parametrize("part", ["tick", "view"])
def test_a_loop_that_fails_ends_the_coordinator(monkeypatch, deaths, part) -> None:
    """What is told to nobody is not the failure of one message: Ray starts it again."""

    def planted(*_args: object) -> None:
        raise ZeroDivisionError("planted")

    service = CoordinatorService(CONFIG)
    try:
        monkeypatch.setattr(service._conductor, part, planted)
        deadline = time.monotonic() + SOON_S
        while not deaths:
            assert time.monotonic() < deadline, "the loop has ended and nobody knows"
            time.sleep(0.005)
        [(loop, error)] = deaths
        assert loop == "coordinator" and isinstance(error, ZeroDivisionError)
        deaths.clear()
    finally:
        service.stop()


def test_a_word_that_cannot_be_handled_harms_no_other(service, connect, monkeypatch) -> None:
    watcher, engine = connect(), connect()
    service.join([member(0)], SOON_S)
    watcher.send(Watch(0))
    hear(watcher, lambda _view: True)
    hear_word, failed = service._conductor.hear, []

    def once(word, now):
        if not failed:
            failed.append(word)
            raise ZeroDivisionError("planted")
        return hear_word(word, now)

    monkeypatch.setattr(service._conductor, "hear", once)
    engine.send(msgspec.Raw(b"\xc1"))
    for steps in (1, 2):
        engine.send(EngineReport(0, steps=steps))
    hear(watcher, lambda view: [report.steps for report in view.reports] == [2])
    assert failed == [EngineReport(0, steps=1)] and service._inbox.malformed == 1


class JumpingClock:
    """Real time, and what the test adds to it."""

    def __init__(self) -> None:
        self.jumped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.jumped_s


def test_who_was_stopped_forgets_no_watcher() -> None:
    clock = JumpingClock()
    service = CoordinatorService(CONFIG, clock=clock)
    watcher: Outlet[ClusterView] = Outlet(service.address, ClusterView, service.keys)
    try:
        watcher.send(Watch(0))
        hear(watcher, lambda _view: True)
        clock.jumped_s += 100.0
        service.join([member(0)], SOON_S)
        hear(watcher, lambda view: view.roster.ranks == [0])
    finally:
        service.stop()
        watcher.close()


def test_a_successor_that_was_stopped_while_it_listened_listens_on() -> None:
    """Its time is over when it wakes, and nothing of what was said meanwhile has been taken in."""
    clock = JumpingClock()
    service = CoordinatorService(CONFIG, recover=True, clock=clock)
    watcher: Outlet[ClusterView] = Outlet(service.address, ClusterView, service.keys)
    engine: Outlet[EngineCommand] = Outlet(service.address, EngineCommand, service.keys)
    try:
        clock.jumped_s += 100.0
        watcher.send(Watch(0))
        while not service._watchers:
            time.sleep(0.001)
        engine.send(EngineHello(member(0), 1, [0], 0, 0))
        assert service.view().roster.ranks == [0]
    finally:
        service.stop()
        watcher.close()
        engine.close()


def test_a_change_of_the_roster_reaches_every_watcher(service, connect) -> None:
    watchers = [connect() for _ in range(3)]
    for index, watcher in enumerate(watchers):
        watcher.send(Watch(index))
        hear(watcher, lambda _view: True)
    for step in (
        lambda: service.join([member(0), member(1)], SOON_S),
        lambda: service.leave([1]),
        lambda: service.lose([1]),
    ):
        roster = step()
        for watcher in watchers:
            hear(watcher, lambda view, roster=roster: view.roster == roster)


def test_a_report_reaches_the_watchers(service, connect) -> None:
    service.join([member(0)], SOON_S)
    watcher, engine = connect(), connect()
    watcher.send(Watch(0))
    report = EngineReport(0, running=3, waiting=2, kv_usage=0.25, steps=7)
    engine.send(EngineReport(5, steps=1))
    engine.send(report)
    assert hear(watcher, lambda view: bool(view.reports)).reports == [report]


def test_each_ingress_is_told_what_all_others_have_counted(service) -> None:
    def said(index: int, *, total: float) -> dict[str, list[float]]:
        """What ingress `index` is told when it has counted so much."""
        outlet: Outlet[IngressWord] = Outlet(service.address, IngressWord, service.keys)
        try:
            outlet.send(Watch(index, counts={"n": [total]}))
            deadline = time.monotonic() + SOON_S
            while time.monotonic() < deadline:
                word = outlet.receive(0.5)
                if isinstance(word, OthersCounts):
                    return word.counts
            raise AssertionError("nothing was told")
        finally:
            outlet.close()

    assert said(1, total=3) == {}
    assert said(2, total=4) == {"n": [3.0]}
    assert said(3, total=1) == {"n": [7.0]}
    assert said(1, total=5) == {"n": [5.0]}
    assert said(2, total=4) == {"n": [6.0]}


def test_who_does_not_watch_hears_nothing(service, connect) -> None:
    engine, watcher = connect(), connect()
    watcher.send(Watch(0))
    engine.send(EngineReport(0))
    service.join([member(0)], SOON_S)
    hear(watcher, lambda view: view.roster.ranks == [0])
    assert engine.receive(0.0) is None


def test_heartbeats_come_without_changes(service, connect) -> None:
    watcher = connect()
    watcher.send(Watch(0))
    first = hear(watcher, lambda _view: True)
    assert [hear(watcher, lambda _view: True) for _ in range(3)] == [first] * 3


def test_continuous_reports_do_not_hold_views_back(service, connect) -> None:
    """Engines talk without a pause, for a second; views go on coming meanwhile."""
    service.join([member(0)], SOON_S)
    watcher = connect()
    watcher.send(Watch(0))
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
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            view = watcher.receive(0.1)
            seen += [report.steps for report in view.reports] if view else []
    finally:
        quiet.set()
        thread.join()
    assert len(set(seen)) >= 4, "views did not come while engines talked"
    assert seen == sorted(seen)


def test_nonsense_and_watchers_that_have_gone_harm_nobody(service, connect) -> None:
    gone: Outlet[ClusterView] = Outlet(service.address, ClusterView, service.keys)
    gone.send(Watch(9))
    hear(gone, lambda _view: True)
    gone.close()
    watcher = connect()
    for nonsense in (b"", b"\x93\x01\xa1\xff", b"\x91\x63", b"\xc1"):
        watcher.send(msgspec.Raw(nonsense))
    watcher.send(Watch(0))
    service.join([member(0)], SOON_S)
    assert hear(watcher, lambda view: view.roster.epoch == 1)


def test_a_word_that_cannot_be_handled_harms_nobody(service, connect) -> None:
    service.join([member(0)], SOON_S)
    engine, watcher = connect(), connect()
    engine.send(EngineReport(0, wave_phase=99))
    engine.send(EngineReport(0, steps=5))
    watcher.send(Watch(0))
    assert hear(watcher, lambda view: bool(view.reports)).reports[0].steps == 5


def test_commands_go_to_the_engine_that_has_the_rank_now(connect_to) -> None:
    """Its predecessor spoke first, and it has not introduced itself yet when it joins."""
    service, connect = connect_to
    joins: list[threading.Thread] = []
    for incarnation in (1, 2):
        engine = msgspec.structs.replace(member(0), incarnation=incarnation)
        joins.append(threading.Thread(target=service.join, args=([engine], SOON_S)))
        outlet = connect()
        if incarnation == 1:
            outlet.send(EngineHello(engine))
        joins[-1].start()
        while 0 not in service._conductor.coming:
            time.sleep(0.001)
        outlet.send(EngineHello(engine))
        command = outlet.receive(SOON_S)
        assert isinstance(command, ReconfigureDistributedRequest), command
        outlet.send(Joined(0, incarnation, command.epoch))
        assert isinstance(outlet.receive(SOON_S), Resume)
        joins[-1].join(SOON_S)
        assert service.view().roster.ranks == [0]
        service.lose([0])


@pytest.fixture
def connect_to() -> Iterator[tuple[CoordinatorService, Callable[[], Outlet[EngineCommand]]]]:
    """A coordinator of engines that share experts, and a way to be one of them."""
    service = CoordinatorService(CONFIG, lockstep=True)
    outlets: list[Outlet[EngineCommand]] = []

    def make() -> Outlet[EngineCommand]:
        outlets.append(Outlet(service.address, EngineCommand, service.keys))
        return outlets[-1]

    yield service, make
    for outlet in outlets:
        outlet.close()
    service.stop()
