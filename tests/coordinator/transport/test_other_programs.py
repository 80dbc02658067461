"""An outlet recovers after another program had taken the port of its peer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from swell.coordinator.transport.channel import (
    AsyncOutlet,
    ChannelAddress,
    ChannelKeys,
    Inbox,
    Outlet,
    make_keys,
)
from tests.coordinator.transport.test_authenticator import eventually
from tests.support.deadlines import HANG_S
from tests.support.untrusted.untrusted_peers import greeting, knocks

pytestmark = pytest.mark.slow

SERVER = greeting(b"CURVE")[:32] + b"\1" + bytes(31)
ANSWERS = {
    "closes": b"",
    "http": b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n",
    "curve server": SERVER + bytes(200),
    **{name: knock for name, knock in knocks().items() if name.startswith("zmtp")},
}


@pytest.fixture(scope="module")
def keys() -> ChannelKeys:
    return make_keys()


class OtherProgram:
    """A program that answers each connection with the same bytes and closes it."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.visits = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                visitor, _ = self._socket.accept()
                with visitor, contextlib.suppress(OSError):
                    visitor.settimeout(HANG_S)
                    visitor.sendall(self._answer)
                    visitor.shutdown(socket.SHUT_WR)
                    while visitor.recv(4096):
                        """Waits until the visitor has read the answer and has closed the
                        connection, too."""
                self.visits += 1

    def close(self) -> None:
        with contextlib.suppress(OSError):  # already closed
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(HANG_S)
        self._socket.close()


@pytest.fixture(params=ANSWERS)
def other(request) -> Iterator[OtherProgram]:
    program = OtherProgram(ANSWERS[request.param])
    yield program
    program.close()


def far(port: int) -> ChannelAddress:
    return ChannelAddress("another", "ipc://@nowhere", f"tcp://127.0.0.1:{port}")


def successor(program: OtherProgram, keys: ChannelKeys) -> Inbox[str]:
    program.close()
    return Inbox(str, keys, port=program.port)


def first_message(inbox: Inbox[str]) -> str:
    """Returns the next message if it arrives within a moment, otherwise ""."""
    return next((message for _, message in inbox.receive(0.02)), "")


def test_an_outlet_reaches_its_peer_after_another_program(other, keys) -> None:
    outlet: Outlet[str] = Outlet(far(other.port), str, keys)
    outlet.send("early")
    eventually(lambda: other.visits, bool)
    for _ in range(20):  # no call waits
        outlet.send("meanwhile")
        outlet.receive(0.005)
    inbox = successor(other, keys)
    deadline = time.monotonic() + HANG_S
    received = ""
    while not received and time.monotonic() < deadline:
        outlet.send("again")
        received = first_message(inbox)
    assert received
    outlet.close()
    inbox.close()


def test_an_outlet_that_only_listens_tries_again(other, keys) -> None:
    """An outlet that only receives reconnects, as an engine that waits for its coordinator must."""
    outlet: Outlet[str] = Outlet(far(other.port), str, keys)
    deadline = time.monotonic() + HANG_S
    while other.visits < 3 and time.monotonic() < deadline:
        assert outlet.receive(0.01) is None
    assert other.visits >= 3
    outlet.close()


def test_an_async_outlet_reaches_its_peer_after_another_program(other, keys) -> None:
    async def talk() -> list[str]:
        answers: list[str] = []
        outlet: AsyncOutlet[str] = AsyncOutlet(far(other.port), str, keys, answers.append)
        outlet.send("early")
        while not other.visits:
            await asyncio.sleep(0.01)
        for _ in range(20):
            outlet.send("meanwhile")
            assert not outlet.is_connected()
            await asyncio.sleep(0.005)
        inbox = successor(other, keys)
        deadline = time.monotonic() + HANG_S
        # without sending a message
        while not outlet.is_connected() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        outlet.send("again")
        while not answers and time.monotonic() < deadline:
            for peer, _ in inbox.receive(0.0):
                inbox.send(peer, "answer")
            await asyncio.sleep(0.01)
        outlet.close()
        inbox.close()
        return answers

    assert asyncio.run(talk())[:1] == ["answer"]
