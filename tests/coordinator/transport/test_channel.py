"""The channel: ordered, encrypted, and unaffected by untrusted peers and by malformed messages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from swell.configs.runtime.network import PortsTakenError, coordinator_ports, other_ports
from swell.coordinator.transport import channel
from swell.coordinator.transport.channel import (
    AsyncOutlet,
    ChannelAddress,
    ChannelKeys,
    Inbox,
    Outlet,
    connect_soon,
    make_keys,
    this_machine,
)
from swell.coordinator.transport.ports import free_port
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow


HOST = "127.0.0.7"
NEVER_S = 0.2
"""How long a test waits for a message that must not arrive, in seconds."""


@pytest.fixture(scope="module")
def keys() -> ChannelKeys:
    return make_keys()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    # the context of the process, with its threads, is kept
    channel._context_of(os.getpid()).socket(zmq.DEALER).close(linger=0)
    before = len(os.listdir("/proc/self/fd"))
    yield
    deadline = time.monotonic() + HANG_S
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before, "a socket was left open"


@pytest.fixture
def inbox(keys: ChannelKeys) -> Iterator[Inbox[str]]:
    inbox: Inbox[str] = Inbox(str, keys)
    yield inbox
    inbox.close()


@pytest.fixture(params=["ipc", "tcp"])
def address(request, inbox: Inbox[str]) -> ChannelAddress:
    """Returns the inbox's address as a peer of the same machine or of another one sees it."""
    if request.param == "ipc":
        return inbox.address
    return msgspec.structs.replace(inbox.address, machine="another")


@pytest.fixture
def outlet(address: ChannelAddress, keys: ChannelKeys) -> Iterator[Outlet[str]]:
    outlet: Outlet[str] = Outlet(address, str, keys)
    yield outlet
    outlet.close()


def take(inbox: Inbox[str], count: int) -> list[tuple[bytes, str]]:
    """Returns the next `count` messages."""
    received: list[tuple[bytes, str]] = []
    deadline = time.monotonic() + HANG_S
    while len(received) < count:
        assert time.monotonic() < deadline, f"{len(received)} of {count} messages came"
        received += inbox.receive(0.1)
    return received


# -------------------------------------------------------------------------------- messages


def test_messages_keep_their_order_both_ways(inbox, outlet) -> None:
    sent = [str(i) for i in range(500)]
    for message in sent:
        outlet.send(message)
    received = take(inbox, len(sent))
    assert [message for _, message in received] == sent
    (peer,) = {peer for peer, _ in received}
    for message in sent:
        inbox.send(peer, message)
    assert [outlet.receive(HANG_S) for _ in sent] == sent


def test_each_peer_gets_its_own_answers(inbox, address, keys) -> None:
    outlets: list[Outlet[str]] = [Outlet(address, str, keys) for _ in range(4)]
    for index, outlet in enumerate(outlets):
        outlet.send(str(index))
    received = take(inbox, len(outlets))
    assert len({peer for peer, _ in received}) == len(outlets)
    for peer, message in received:
        inbox.send(peer, f"answer {message}")
    for index, outlet in enumerate(outlets):
        assert outlet.receive(HANG_S) == f"answer {index}"
        assert outlet.receive(0.0) is None
        outlet.close()


def test_the_inbox_receives_the_chosen_identity(inbox, address, keys) -> None:
    outlet: Outlet[str] = Outlet(address, str, keys, identity=b"me")
    outlet.send("x")
    assert take(inbox, 1) == [(b"me", "x")]
    outlet.close()


def test_a_wait_without_messages_times_out(inbox, outlet) -> None:
    assert list(inbox.receive(0.0)) == list(inbox.receive(0.01)) == []
    assert outlet.receive(0.0) is None and outlet.receive(0.01) is None


def test_an_inbox_drops_what_it_cannot_deliver(inbox, outlet) -> None:
    inbox.send(b"nobody", "x")
    outlet.send("y")
    assert [message for _, message in take(inbox, 1)] == ["y"]


@pytest.mark.parametrize("near", [True, False])
def test_an_outlet_keeps_its_messages_until_the_peer_connects(keys, near) -> None:
    free: Inbox[str] = Inbox(str, keys)
    later = free.address
    free.close()
    name, port = later.ipc.removeprefix("ipc://@swell-"), int(later.tcp.rpartition(":")[2])
    address = later if near else msgspec.structs.replace(later, machine="another")
    outlet: Outlet[str] = Outlet(address, str, keys)
    outlet.send("early")
    inbox: Inbox[str] = Inbox(str, keys, name=name, port=port)
    assert inbox.address == later
    assert [message for _, message in take(inbox, 1)] == ["early"]
    outlet.close()
    inbox.close()


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\xa2\xff\xfe",  # text that is not UTF-8
        msgspec.msgpack.encode(7),
        msgspec.msgpack.encode(["x"]),
        msgspec.msgpack.encode("x") + b"\x00",
    ],
)
def test_a_frame_that_does_not_decode_is_skipped(inbox, outlet, frame) -> None:
    outlet.send("before")
    outlet.send(msgspec.Raw(frame))
    outlet.send("after")
    assert [message for _, message in take(inbox, 2)] == ["before", "after"]


def test_a_message_of_several_frames_is_skipped(inbox, outlet) -> None:
    outlet._socket.send_multipart([b"\xa1x", b"\xa1y"])
    outlet.send("after")
    assert [message for _, message in take(inbox, 1)] == ["after"]


# -------------------------------------------------------------------------------- closing


def test_messages_sent_right_before_closing_arrive(inbox, address, keys) -> None:
    outlet: Outlet[str] = Outlet(address, str, keys)
    outlet.send("last messages")
    outlet.close()
    assert [message for _, message in take(inbox, 1)] == ["last messages"]


def test_an_inbox_that_closes_delivers_its_last_answer(keys) -> None:
    inbox: Inbox[str] = Inbox(str, keys)
    outlet: Outlet[str] = Outlet(inbox.address, str, keys)
    outlet.send("x")
    ((peer, _),) = take(inbox, 1)
    inbox.send(peer, "last messages")
    inbox.close()
    assert outlet.receive(HANG_S) == "last messages"
    outlet.close()


def test_the_name_on_one_machine_is_abstract_and_leaves_no_file(inbox) -> None:
    name = inbox.address.ipc.removeprefix("ipc://")
    assert name.startswith("@")
    assert not any(os.path.exists(path) for path in (name, name[1:], f"/tmp/{name[1:]}"))
    assert name in Path("/proc/net/unix").read_text()
    assert inbox.address.machine == this_machine()
    assert inbox.address.tcp.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize("taken", ["name", "port"])
def test_a_successor_waits_until_its_address_is_free(keys, taken) -> None:
    first: Inbox[str] = Inbox(str, keys, name=secrets.token_hex(8))
    name, port = first.address.ipc.rpartition("-")[2], int(first.address.tcp.split(":")[-1])
    place = {"name": name} if taken == "name" else {"port": port}
    made: Future[Inbox[str]] = Future()
    thread = threading.Thread(target=lambda: made.set_result(Inbox(str, keys, **place)))
    thread.start()
    time.sleep(NEVER_S)
    assert not made.done()
    first.close()
    second = made.result(HANG_S)
    thread.join()
    same = "ipc" if taken == "name" else "tcp"
    assert getattr(second.address, same) == getattr(first.address, same)
    second.close()


def test_inboxes_share_a_range_of_ports_until_all_are_in_use(keys) -> None:
    """Inboxes use the ports after the first quarter, which is reserved for `coordinator_ports`."""
    kept, ports = (part(range(21_300, 21_316)) for part in (coordinator_ports, other_ports))
    assert kept is not None and ports is not None
    inboxes = [Inbox(str, keys, HOST, ports=ports) for _ in range(12)]
    taken = {int(inbox.address.tcp.rpartition(":")[2]) for inbox in inboxes}
    assert taken == set(ports)
    assert {inbox.address.tcp.rpartition(":")[0] for inbox in inboxes} == {f"tcp://{HOST}"}
    with pytest.raises(
        PortsTakenError,
        match=rf"21304-21315 is free on {HOST}; set a larger range in cluster\.ports",
    ):
        Inbox(str, keys, HOST, ports=ports)
    assert free_port(HOST, kept) in kept
    inboxes.pop().close()
    inboxes.append(Inbox(str, keys, HOST, ports=ports))
    for inbox in inboxes:
        inbox.close()


def test_an_unavailable_address_is_an_error(keys) -> None:
    with pytest.raises(zmq.ZMQError, match="assign"):
        Inbox(str, keys, "192.0.2.1", port=20_000)


# -------------------------------------------------------------------------------- untrusted peers


@pytest.mark.parametrize("knows", ["nothing", "other keys", "a CURVE server without its key"])
def test_an_untrusted_peer_receives_nothing_and_is_harmless(
    inbox, address, outlet, keys, knows
) -> None:
    """An untrusted peer receives nothing and does not disturb peers: its handshake fails in
    ZeroMQ's thread, so the inbox receives nothing from it."""
    outlet.send("mine")
    ((peer, _),) = take(inbox, 1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as untrusted_peer:
        untrusted_peer.linger = 0
        untrusted_peer.identity = peer
        if knows == "other keys":
            other = make_keys()
            untrusted_peer.curve_serverkey = other.public
            untrusted_peer.curve_publickey, untrusted_peer.curve_secretkey = (
                other.public,
                other.secret,
            )
        elif knows != "nothing":
            untrusted_peer.curve_server = True
            untrusted_peer.curve_publickey, untrusted_peer.curve_secretkey = zmq.curve_keypair()
        untrusted_peer.connect(address.ipc if address.machine == this_machine() else address.tcp)
        # it was refused so early that the connection is already closed
        with contextlib.suppress(zmq.Again):
            untrusted_peer.send(msgspec.msgpack.encode("intruder"), zmq.NOBLOCK)
        assert list(inbox.receive(NEVER_S)) == []
        inbox.send(peer, "secret")
        assert outlet.receive(HANG_S) == "secret"
        assert not untrusted_peer.poll(NEVER_S * 1000)
        outlet.send("still here")
        assert take(inbox, 1) == [(peer, "still here")]


def test_bytes_of_another_protocol_are_harmless(inbox, outlet) -> None:
    host, _, port = inbox.address.tcp.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=HANG_S) as untrusted_peer:
        untrusted_peer.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50)
        outlet.send("fine")
        assert [message for _, message in take(inbox, 1)] == ["fine"]


# -------------------------------------------------------------------------------- event loops


def test_an_async_outlet_sends_in_order(inbox, address, keys) -> None:
    async def talk() -> list[str]:
        queue: asyncio.Queue[str] = asyncio.Queue()
        outlet: AsyncOutlet[str] = AsyncOutlet(address, str, keys, queue.put_nowait)
        for i in range(100):
            outlet.send(str(i))
        received = take(inbox, 100)
        for peer, message in received:
            inbox.send(peer, message)
        answers = [await asyncio.wait_for(queue.get(), HANG_S) for _ in range(100)]
        outlet.close()
        return answers

    assert asyncio.run(talk()) == [str(i) for i in range(100)]


def test_an_async_outlet_may_be_closed_twice(address, keys) -> None:
    """A second `close` does nothing, even if another file has got the outlet's file descriptor by
    then."""

    async def close_twice() -> None:
        outlet: AsyncOutlet[str] = AsyncOutlet(address, str, keys, print)
        fd = outlet._fd
        # opened before the number is free, so that neither of them gets it
        reader, writer = os.pipe()
        outlet.close()
        while Path(f"/proc/self/fd/{fd}").exists():  # ZeroMQ's own thread closes it
            await asyncio.sleep(0.01)
        os.dup2(reader, fd)
        came = asyncio.Event()
        asyncio.get_running_loop().add_reader(fd, came.set)
        outlet.close()
        os.write(writer, b"x")
        await asyncio.wait_for(came.wait(), HANG_S)
        asyncio.get_running_loop().remove_reader(fd)
        for number in {reader, writer, fd}:
            os.close(number)

    asyncio.run(close_twice())


def test_many_async_outlets_share_two_threads(inbox, keys) -> None:
    """Outlets of a process share ZeroMQ's threads; an ingress has one outlet for each engine."""

    async def talk() -> int:
        begun = len(os.listdir("/proc/self/task"))
        outlets: list[AsyncOutlet[str]] = [
            AsyncOutlet(inbox.address, str, keys, print) for _ in range(50)
        ]
        for outlet in outlets:
            outlet.send("hello")
        take(inbox, 50)
        threads = len(os.listdir("/proc/self/task")) - begun
        for outlet in outlets:
            outlet.close()
        return threads

    assert asyncio.run(talk()) <= 2


def test_sending_does_not_swallow_the_wake_up_of_a_message(inbox, address, keys) -> None:
    """ZeroMQ's file descriptor signals only once. A message that arrived while the loop was busy
    must be received even if the loop sends before it polls."""

    async def talk() -> None:
        queue: asyncio.Queue[str] = asyncio.Queue()
        outlet: AsyncOutlet[str] = AsyncOutlet(address, str, keys, queue.put_nowait)
        outlet.send("hello")
        ((peer, _),) = take(inbox, 1)
        for i in range(3):
            waiting = asyncio.create_task(queue.get())
            await asyncio.sleep(0.01)
            inbox.send(peer, str(i))
            time.sleep(0.05)  # the message arrives while this loop is busy
            outlet.send("x")
            assert await asyncio.wait_for(waiting, HANG_S / 4) == str(i)
        outlet.close()

    asyncio.run(talk())


def test_checking_the_connection_does_not_swallow_the_wake_up(inbox, address, keys) -> None:
    """The same holds for a loop that only calls `is_connected`."""

    async def talk() -> None:
        queue: asyncio.Queue[str] = asyncio.Queue()
        outlet: AsyncOutlet[str] = AsyncOutlet(address, str, keys, queue.put_nowait)
        outlet.send("hello")
        ((peer, _),) = take(inbox, 1)
        for i in range(5):
            waiting = asyncio.create_task(queue.get())
            await asyncio.sleep(0.01)
            inbox.send(peer, str(i))
            time.sleep(0.05)  # the message arrives while this loop is busy
            assert outlet.is_connected()
            assert await asyncio.wait_for(waiting, HANG_S / 4) == str(i)
        outlet.close()

    asyncio.run(talk())


def test_an_outlet_closed_by_a_message_delivers_no_later_one(inbox, address, keys) -> None:
    async def talk() -> tuple[list[str], list[Any]]:
        received: list[str] = []
        problems: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: problems.append(context)
        )

        def close(message: str) -> None:
            received.append(message)
            outlet.close()

        outlet: AsyncOutlet[str] = AsyncOutlet(address, str, keys, close)
        outlet.send("hello")
        ((peer, _),) = take(inbox, 1)
        for i in range(3):
            inbox.send(peer, str(i))
        while not received:
            await asyncio.sleep(0.01)
        await asyncio.sleep(NEVER_S)
        return received, problems

    assert asyncio.run(talk()) == (["0"], [])


def test_an_immediate_handshake_is_detected(
    inbox: Inbox[str], keys: ChannelKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handshake that completes at once is noticed, even if the connecting thread is held up just
    after it."""

    class Slow(channel.FrameDecoder[str]):
        def __init__(self, message_type: Any) -> None:
            time.sleep(0.3)
            super().__init__(message_type)

    monkeypatch.setattr(channel, "FrameDecoder", Slow)

    async def scenario() -> None:
        outlet: AsyncOutlet[str] = AsyncOutlet(inbox.address, str, keys, lambda message: None)
        async with asyncio.timeout(HANG_S):
            while not outlet.is_connected():
                await asyncio.sleep(0.01)
        outlet.close()

    asyncio.run(scenario())


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Yields a port whose connection attempts are dropped, because the listener's queue is full."""
    with socket.socket() as door, socket.socket() as first, socket.socket() as second:
        door.bind((HOST, 0))
        door.listen(0)
        for filling in (first, second):
            filling.setblocking(False)
            filling.connect_ex(door.getsockname())
        yield door.getsockname()[1]


def test_an_unanswered_connection_attempt_is_retried(silent_port: int) -> None:
    """A link that works again is used at once."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as outlet:
        outlet.linger = 0
        connect_soon(outlet)
        retried = outlet.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
        outlet.connect(f"tcp://{HOST}:{silent_port}")
        for _ in range(2):  # ZeroMQ sets the delay to the next attempt before each attempt
            assert retried.poll(HANG_S * 1000), "it waits for TCP, for up to two minutes"
            assert recv_monitor_message(retried)["event"] == zmq.EVENT_CONNECT_RETRIED
        retried.close(linger=0)
        outlet.disable_monitor()
