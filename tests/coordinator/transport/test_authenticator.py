"""An inbox accepts peers that have the cluster's keys, and untrusted peers cost it little."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from swell.configs.runtime.log import StructuredLogger
from swell.coordinator.transport import authenticator
from swell.coordinator.transport.channel import (
    ChannelAddress,
    ChannelKeys,
    Inbox,
    Outlet,
    make_keys,
)
from swell.coordinator.transport.handshakes import MAX_MESSAGE_BYTES, MAX_PENDING, PendingHandshakes
from tests.coordinator.transport.test_channel import NEVER_S, take
from tests.support.deadlines import HANG_S
from tests.support.untrusted.untrusted_peers import (
    Door,
    Recorder,
    greeting,
    knock_with_keys,
    knocks,
    visit,
)

pytestmark = pytest.mark.slow

SEVERAL = 40


@pytest.fixture(scope="module")
def keys() -> ChannelKeys:
    return make_keys()


@pytest.fixture
def inbox(keys: ChannelKeys) -> Iterator[Inbox[str]]:
    inbox: Inbox[str] = Inbox(str, keys)
    yield inbox
    inbox.close()


def door_of(address: ChannelAddress, family: str) -> Door:
    if family == "unix":
        return Door("unix", address.ipc.removeprefix("ipc://"))
    host, _, port = address.tcp.removeprefix("tcp://").rpartition(":")
    return Door("tcp", host, int(port))


@pytest.fixture(params=["tcp", "unix"])
def door(request, inbox: Inbox[str]) -> Door:
    return door_of(inbox.address, request.param)


def distant(address: ChannelAddress) -> ChannelAddress:
    """Returns the address as a peer on another machine sees it."""
    return msgspec.structs.replace(address, machine="another")


@pytest.fixture
def peer(inbox: Inbox[str], keys: ChannelKeys) -> Iterator[Outlet[str]]:
    """Yields a peer that connected before the untrusted peers."""
    outlet: Outlet[str] = Outlet(distant(inbox.address), str, keys, identity=b"peer")
    outlet.send("before")
    assert take(inbox, 1) == [(b"peer", "before")]
    yield outlet
    outlet.close()


def assert_serves(inbox: Inbox[str], peer: Outlet[str]) -> None:
    """Asserts that only the peer's message is received."""
    peer.send("after")
    assert take(inbox, 1) == [(b"peer", "after")]
    inbox.send(b"peer", "answer")
    assert peer.receive(HANG_S) == "answer"
    assert inbox.malformed == 0


def test_a_peer_with_only_the_public_key_is_refused(inbox, peer, door, keys) -> None:
    """A client that only knows the server's public key is refused; CURVE itself would accept it."""
    frame = msgspec.msgpack.encode("intruder")
    own = zmq.curve_keypair()
    assert not knock_with_keys(door, *own, keys.public, frame)
    assert_serves(inbox, peer)
    mine: Outlet[str] = Outlet(inbox.address, str, keys)
    mine.send("mine")
    assert [message for _, message in take(inbox, 1)] == ["mine"]
    mine.close()


@pytest.mark.parametrize("name", list(knocks()))
def test_a_rejected_connection_changes_nothing(inbox, peer, door, name) -> None:
    visit(door, knocks()[name])
    assert_serves(inbox, peer)


def test_replayed_frames_are_rejected(inbox, peer, keys) -> None:
    """Recorded frames cannot be replayed: each connection has its own session keys."""
    door = door_of(inbox.address, "tcp")
    with recorder() as recorded:
        outlet: Outlet[str] = Outlet(distant(inbox.address), str, keys, identity=b"victim")
        outlet.send("once")
        assert take(inbox, 1) == [(b"victim", "once")]
        outlet.close()
        least = len(greeting(b"CURVE")) + 200

        def handshakes() -> list[bytes]:
            """Returns the recorded complete handshakes; the heartbeat of another connection begins
            differently."""
            sent = recorded.sent_to(door.port)
            return [frames for frames in sent if frames[:1] == b"\xff" and len(frames) > least]

        (frames,) = eventually(handshakes, bool)
    for cut in (len(frames), 64, 64 + 202):
        visit(door, frames[:cut])
    visit(door, frames[64:])
    assert_serves(inbox, peer)


@contextlib.contextmanager
def recorder() -> Iterator[Recorder]:
    try:
        made = Recorder()
    except PermissionError:
        pytest.skip("this process may not open packet sockets")
    with made as recorded:
        yield recorded


LONG_S = 30
"""A generous timeout: with this many connections at once, the kernel's queue may be full at
first."""


def eventually(value, is_good):
    deadline = time.monotonic() + HANG_S
    while not is_good(found := value()):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return found


# -------------------------------------------------------------------------------- costs


def is_open(untrusted_peer: socket.socket) -> bool:
    """Whether the inbox keeps the connection open; its greeting is read and discarded."""
    untrusted_peer.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        try:
            while untrusted_peer.recv(4096):
                pass
        except ConnectionError:
            pass
        return False
    return True


def sockets_of_this_process() -> int:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum(bool(re.match("socket:", link)) for link in links)


def test_untrusted_peers_hold_a_limited_number_of_connections(inbox, peer, door) -> None:
    before = sockets_of_this_process()
    untrusted_peers = [door.connect(LONG_S) for _ in range(MAX_PENDING + SEVERAL)]
    held = eventually(
        lambda: sum(is_open(untrusted_peer) for untrusted_peer in untrusted_peers),
        lambda held: held <= MAX_PENDING,
    )
    assert held == MAX_PENDING
    ends = len(untrusted_peers)
    eventually(sockets_of_this_process, lambda now: now - before - ends <= MAX_PENDING)
    assert_serves(inbox, peer)
    for untrusted_peer in untrusted_peers:
        untrusted_peer.close()


def test_few_refusals_are_logged(keys, monkeypatch) -> None:
    """The first, the second, the fourth and so on, also if the thread finds many connections at
    once."""
    accepted = PendingHandshakes.accepted
    connected = threading.Event()
    logged: list[int] = []

    def accept_late(pending: PendingHandshakes, connection: int, now: float) -> bool:
        connected.wait(LONG_S)
        return accepted(pending, connection, now)

    def warning(self: StructuredLogger, text: str, **fields: int) -> None:
        logged.append(fields["refused"])

    monkeypatch.setattr(PendingHandshakes, "accepted", accept_late)
    monkeypatch.setattr(StructuredLogger, "warning", warning)
    inbox: Inbox[str] = Inbox(str, keys)
    door = door_of(inbox.address, "tcp")
    untrusted_peers = [door.connect(LONG_S) for _ in range(MAX_PENDING + SEVERAL)]
    connected.set()
    eventually(
        lambda: sum(is_open(untrusted_peer) for untrusted_peer in untrusted_peers),
        lambda held: held == MAX_PENDING,
    )
    inbox.close()
    for untrusted_peer in untrusted_peers:
        untrusted_peer.close()
    assert logged == [1, 2, 4, 8, 16, 32]


def test_all_peers_are_refused_without_the_thread(keys, monkeypatch) -> None:
    """This includes peers with the keys of the cluster."""
    ended = threading.Event()

    def answer_nothing(self: authenticator.Authenticator) -> None:
        ended.wait()
        self._zap.close()
        self._monitor.close()

    monkeypatch.setattr(authenticator.Authenticator, "_run", answer_nothing)
    inbox: Inbox[str] = Inbox(str, keys)
    outlet = ObservedOutlet(distant(inbox.address), str, keys)
    outlet.send("hello")
    assert list(inbox.receive(NEVER_S)) == []
    assert outlet.next_event() != zmq.EVENT_HANDSHAKE_SUCCEEDED
    outlet.close()
    ended.set()
    inbox.close()


def test_a_peer_connects_after_the_timeout_of_untrusted_peers(keys, monkeypatch) -> None:
    """Untrusted peers that send nothing are closed after the handshake timeout, which makes room
    for a peer."""
    monkeypatch.setattr(authenticator, "HANDSHAKE_S", 0.5)
    inbox: Inbox[str] = Inbox(str, keys)
    door = door_of(inbox.address, "tcp")
    untrusted_peers = [door.connect(LONG_S) for _ in range(MAX_PENDING + SEVERAL)]
    outlet: Outlet[str] = Outlet(distant(inbox.address), str, keys)
    outlet.send("hello")
    assert [message for _, message in take(inbox, 1)] == ["hello"]
    eventually(
        lambda: [untrusted_peer for untrusted_peer in untrusted_peers if is_open(untrusted_peer)],
        lambda n: not n,
    )
    for untrusted_peer in untrusted_peers:
        untrusted_peer.close()
    outlet.close()
    inbox.close()


class ObservedOutlet(Outlet[str]):
    def _prepare(self) -> None:
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = self._socket.get_monitor_socket(events, "inproc://observed")

    def next_event(self) -> int | None:
        """Returns the next event of the outlet's connections; None if there is none yet."""
        return recv_monitor_message(self._monitor)["event"] if self._monitor.poll(0) else None

    def _close_socket(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        super()._close_socket()


def test_a_peer_is_refused_before_its_handshake_or_not_at_all(keys, monkeypatch) -> None:
    """A peer is refused before its handshake succeeds or not at all: a connection that is closed
    after the handshake loses its messages."""
    accepted = PendingHandshakes.accepted
    handled = 0

    def accept_slowly(pending: PendingHandshakes, connection: int, now: float) -> bool:
        nonlocal handled
        time.sleep(0.005)  # the thread lags far after the connections that the kernel accepts
        handled += 1
        return accepted(pending, connection, now)

    monkeypatch.setattr(PendingHandshakes, "accepted", accept_slowly)
    monkeypatch.setattr(authenticator, "HANDSHAKE_S", 2.0)
    inbox: Inbox[str] = Inbox(str, keys)
    door = door_of(inbox.address, "tcp")
    untrusted_peers = [door.connect(LONG_S) for _ in range(MAX_PENDING + SEVERAL)]
    outlet = ObservedOutlet(distant(inbox.address), str, keys)
    outlet.send("hello")
    assert [message for _, message in take(inbox, 1)] == ["hello"]
    eventually(lambda: handled, lambda handled: handled > len(untrusted_peers))
    for untrusted_peer in untrusted_peers:
        untrusted_peer.close()
    succeeded = eventually(outlet.next_event, bool)
    while succeeded == zmq.EVENT_DISCONNECTED:  # it was refused in time, and connected again
        succeeded = eventually(outlet.next_event, bool)
    outlet.send("after")
    assert [message for _, message in take(inbox, 1)] == ["after"]
    assert outlet.next_event() is None
    outlet.close()
    inbox.close()


@pytest.mark.parametrize("excess", [0, 1])
def test_an_untrusted_peer_may_announce_no_more_than_the_limit(keys, monkeypatch, excess) -> None:
    """A frame larger than the limit is refused when its size is announced, before memory is
    allocated."""
    monkeypatch.setattr(authenticator, "HANDSHAKE_S", 10 * HANG_S)
    inbox: Inbox[str] = Inbox(str, keys)
    size = MAX_MESSAGE_BYTES + excess
    with door_of(inbox.address, "tcp").connect() as untrusted_peer:
        untrusted_peer.sendall(greeting(b"CURVE") + b"\x06" + size.to_bytes(8, "big"))
        if excess:
            eventually(lambda: is_open(untrusted_peer), lambda open_: not open_)
        else:
            time.sleep(NEVER_S)
            assert is_open(untrusted_peer)
    inbox.close()


def test_a_message_may_have_the_limit_minus_the_cipher_overhead(inbox, peer) -> None:
    text = "x" * (MAX_MESSAGE_BYTES - 100)
    peer.send(text)
    assert [len(message) for _, message in take(inbox, 1)] == [len(text)]
    assert_serves(inbox, peer)


def test_a_reused_file_descriptor_is_not_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other file is not changed."""
    copies: list[int] = []

    def duplicate(number: int) -> int:
        """Returns a high number, so that no other thread opens a file with the same one."""
        copies.append(fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 200))
        return copies[-1]

    with (tmp_path / "file").open("wb") as file, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname(), timeout=HANG_S):
            connection, _ = listener.accept()
        monkeypatch.setattr(os, "dup", duplicate)
        for number in (file.fileno(), listener.fileno(), connection.fileno(), 10**6):
            authenticator._shut_down(number)
        with connection:
            assert connection.recv(1) == b""
        file.write(b"a")
        with socket.create_connection(listener.getsockname(), timeout=HANG_S):
            listener.accept()[0].close()
    assert len(copies) == 3
    for copy in copies:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(copy)
