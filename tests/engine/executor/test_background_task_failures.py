"""A failure that is injected into any loop of an engine or its workers is detected at once."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

import swell.worker.worker
from swell.configs.schema import load
from swell.coordinator.roster import Member
from swell.coordinator.transport.channel import Inbox, Outlet, make_keys
from swell.coordinator.transport.runtime import THREADS
from swell.coordinator.wave_protocol.wave_interface import Phase
from swell.coordinator.wave_protocol.waves import WaveMember
from swell.coordinator.wire import (
    CoordinatorMessage,
    EngineCommand,
    EngineHello,
    EngineReport,
    Introduce,
    Joined,
    ReconfigureDistributedRequest,
    StartDPWave,
)
from swell.engine.executor import ExecutorError, GroupBroken
from swell.engine.executor.heartbeat_listener import HeartbeatListener
from swell.engine.executor.inproc import WorkerThread
from swell.engine.serving import actor
from swell.engine.serving.coordinator_client import (
    CoordinatorClient,
    EngineCallbacks,
    EngineSnapshot,
)
from swell.worker.comm.gloo_transport import PeerWaiter
from swell.worker.comm.groups import GroupError
from swell.worker.loop import HeartbeatThread as WorkerHeartbeatThread
from swell.worker.loop import WorkerLoop
from swell.worker.wire import WorkerCommand, WorkerHeartbeat, WorkerMessage
from tests.conftest import Deaths
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

CONFIG = load({"model": {"path": "m"}, "cluster": {"heartbeat_s": 0.05}})


def planted(*_args: Any, **_kwargs: Any) -> Any:
    raise ZeroDivisionError("planted")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.005)


def check(deaths: Deaths, loop: str) -> None:
    until(lambda: deaths)
    [(name, error)] = deaths
    assert name == loop and isinstance(error, ZeroDivisionError)
    deaths.clear()


class Line:
    """An engine's coordinator client, and the coordinator's end of its channel."""

    def __init__(self, **broken: Any) -> None:
        keys = make_keys()
        self.inbox: Inbox[CoordinatorMessage] = Inbox(CoordinatorMessage, keys)
        snapshot = EngineSnapshot.of(Member(0, self.inbox.address), WaveMember(0, 0, 1))
        callbacks: dict[str, Any] = {
            "progress_counter": lambda: 0,
            "num_requests": lambda: 0,
            "workers": lambda: (),
            "abort_collectives": lambda: None,
            "on_command": lambda: None,
            **broken,
        }
        self.client = CoordinatorClient(
            CONFIG.cluster,
            THREADS,
            self.inbox.address,
            keys,
            snapshot,
            EngineCallbacks(**callbacks),
        )
        self.client.start()

    def commands(self) -> list[EngineCommand]:
        """Returns the queued commands, as the engine's loop takes them."""
        return [self.client.commands.get() for _ in range(self.client.commands.qsize())]

    def peer(self) -> bytes:
        peers: list[bytes] = []
        until(lambda: peers.extend(peer for peer, _ in self.inbox.receive(0.05)) or peers)
        return peers[0]

    def receive(self, kind: type) -> Any:
        """Returns the next message of this kind."""
        received: list[Any] = []
        until(
            lambda: (
                received.extend(m for _, m in self.inbox.receive(0.05) if isinstance(m, kind))
                or received
            )
        )
        return received[0]

    def close(self) -> None:
        self.client.stop()
        self.inbox.close()


@pytest.mark.parametrize("callback", ["progress_counter", "abort_collectives", "on_command"])
def test_the_coordinator_client(deaths: Deaths, callback: str) -> None:
    line = Line(**{callback: planted})
    try:
        if callback == "progress_counter":
            line.client.send([EngineReport(0)])
        else:
            line.inbox.send(line.peer(), ReconfigureDistributedRequest(1, [0]))
        check(deaths, "coordinator client")
    finally:
        line.close()


def test_a_heartbeat_counts_requests_since_the_last_report() -> None:
    """A heartbeat counts requests that arrived after the last report. Their first step may never
    complete, and an engine that seems idle would not be replaced."""
    line = Line(num_requests=lambda: 3)
    try:
        line.client.send([EngineReport(0, running=1)])
        assert line.receive(EngineReport).waiting == 0
        assert line.receive(EngineReport).waiting == 2
    finally:
        line.close()


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.PAUSED])
def test_collectives_are_aborted_until_the_loop_handles_the_newest_command(phase: Phase) -> None:
    """Collectives are aborted until the loop has handled the newest command; a paused engine is in
    no collective. The client reads the state that the loop has published."""
    aborts: list[int] = []
    line = Line(abort_collectives=lambda: aborts.append(1))
    try:
        peer, waves = line.peer(), WaveMember(0, 0, 1, epoch=1, phase=phase, ranks=(0, 1))
        member = Member(0, line.inbox.address)
        line.client.publish(EngineSnapshot.of(member, waves))
        line.inbox.send(peer, ReconfigureDistributedRequest(2, [0]))
        line.inbox.send(peer, Introduce())
        hello = line.receive(EngineHello)
        assert (hello.epoch, hello.phase, hello.ranks) == (2, int(Phase.OUT), [0, 1])
        if phase is Phase.PAUSED:
            assert not aborts
            return
        until(lambda: len(aborts) >= 3)
        assert waves.reconfigure(ReconfigureDistributedRequest(2, [0]))
        line.client.publish(EngineSnapshot.of(member, waves))
        line.client.send([Joined(0, 0, 2)])
        line.receive(Joined)
        count = len(aborts)
        time.sleep(5 * CONFIG.cluster.heartbeat_s)
        assert len(aborts) == count
    finally:
        line.close()


def test_a_malformed_command_is_dropped_and_counted() -> None:
    """A malformed command, from an older build of the coordinator or random bytes, is dropped and
    counted."""
    line = Line()
    try:
        peer = line.peer()
        for rubbish in (b"\xc1", b"\x92\x01\x91\xa1\xff", msgspec.msgpack.encode(["unknown"])):
            line.inbox.send(peer, msgspec.Raw(rubbish))
        line.inbox.send(peer, Introduce())
        line.inbox.send(peer, StartDPWave(0, 1))
        until(lambda: not line.client.commands.empty())
        assert line.commands() == [StartDPWave(0, 1)]
        assert line.client._outlet.malformed == 3
    finally:
        line.close()


def test_the_listener_to_the_workers(deaths: Deaths, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = make_keys()
    listener = HeartbeatListener(keys, "127.0.0.1", 1.0)
    try:
        monkeypatch.setattr(listener._monitor, "on_heartbeat", planted)
        worker: Outlet[WorkerCommand] = Outlet(listener.address, WorkerCommand, keys)
        worker.send(WorkerHeartbeat(0, 1, 0))
        check(deaths, "worker heartbeats")
        worker.close()
    finally:
        listener.close()


def test_the_worker_heartbeat_thread(deaths: Deaths) -> None:
    class Worker:
        progress_counter = property(planted)

    keys = make_keys()
    inbox: Inbox[WorkerMessage] = Inbox(WorkerMessage, keys)
    outlets: list[Outlet[WorkerCommand]] = [
        Outlet(inbox.address, WorkerCommand, keys) for _ in range(2)
    ]
    client = WorkerHeartbeatThread(WorkerLoop(0, Worker(), outlets[0]), outlets[1], 0.05)
    check(deaths, "worker heartbeat")
    client.stop()
    for end in (*outlets, inbox):
        end.close()


@pytest.mark.parametrize("raised", [GroupError("a peer has gone"), IndexError("slot 9")])
def test_a_worker_thread_that_fails_to_leave_its_groups_answers(
    monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    class Worker:
        progress_counter = 0
        abort = shutdown = planted

        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            """Does nothing: there is nothing to load."""

        def execute_model(self) -> None:
            raise raised

    monkeypatch.setattr(swell.worker.worker, "Worker", Worker)
    thread = WorkerThread(CONFIG, 0, 1, lambda *_: None)
    wanted = GroupBroken if isinstance(raised, GroupError) else type(raised)
    with pytest.raises(wanted):
        thread.call("execute_model").result(HANG_S)
    with pytest.raises(ExecutorError, match="has already failed"):
        thread.call("regroup").result(HANG_S)
    thread.request_stop()
    thread.join()


def test_a_worker_thread_that_cannot_be_loaded_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "swell.worker.worker", None)
    thread = WorkerThread(CONFIG, 0, 1, lambda *_: None)
    with pytest.raises(ExecutorError, match=r"swell\.worker\.worker"):
        thread.call("load").result(HANG_S)
    thread.request_stop()
    thread.join()


def test_a_wait_for_a_peer_that_fails_in_an_unknown_way_is_answered() -> None:
    class Work:
        wait = planted

    waiter = PeerWaiter()
    with pytest.raises(ZeroDivisionError):
        waiter.wait(Work(), None).result(HANG_S)  # type: ignore[arg-type]
    waiter.close()


@pytest.mark.parametrize("error", [ExecutorError("no room"), SystemExit(3)])
def test_an_engine_whose_loop_failed_logs_the_reason_and_exits(
    deaths: Deaths, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    class Server:
        def run(self) -> None:
            raise error

    answers: list[str | None] = []
    kind = actor.EngineActor.__ray_metadata__.modified_class
    monkeypatch.setattr(actor.time, "sleep", lambda _s: answers.append(shell.ended(0)))
    shell = kind(CONFIG, 0)
    shell._run(Server())
    until_exit = time.monotonic() + HANG_S
    while not deaths:
        assert time.monotonic() < until_exit, "it does not exit"
        threading.Event().wait(0.005)
    assert answers == [f"{type(error).__name__}: {error}"], "the manager can call meanwhile"
    assert deaths == [("engine", error)]
    deaths.clear()
