"""The acceptor takes many pending connections in one iteration of the loop, on every kind of
loop."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from swell.cluster.api.server import http_server
from swell.cluster.api.server.http_server import Acceptor
from tests.support.deadlines import HANG_S

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class Listener(socket.socket):
    """A listening socket whose `accept` first raises the given errors."""

    failures: list[OSError]

    def accept(self) -> Any:
        if self.failures:
            raise self.failures.pop()
        return super().accept()


class Taken(asyncio.Protocol):
    """A protocol that records the loop iteration in which its connection was made."""

    def __init__(self, harness: AcceptorHarness) -> None:
        self._harness = harness

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._harness.turns.append(self._harness.turn)
        self._harness.transports.append(transport)


class AcceptorHarness:
    def __init__(self, clients: int, *failures: int) -> None:
        self.turn = 0
        self.turns: list[int] = []
        self.transports: list[asyncio.BaseTransport] = []
        self.listener = Listener()
        self.listener.failures = [OSError(number, "injected") for number in failures]
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(clients)
        self.listener.setblocking(False)
        self.clients = [
            socket.create_connection(self.listener.getsockname()) for _ in range(clients)
        ]

    def tick(self) -> None:
        self.turn += 1
        if len(self.turns) < len(self.clients):
            asyncio.get_running_loop().call_soon(self.tick)

    async def take(self) -> None:
        server = Acceptor(self.listener, lambda: Taken(self))
        self.tick()
        async with asyncio.timeout(HANG_S):
            while len(self.turns) < len(self.clients):
                await asyncio.sleep(0)
        server.close()
        await server.wait_closed()

    def close(self) -> None:
        for one in (*self.transports, *self.clients, self.listener):
            one.close()


def run(make_loop: Callable[[], Any], work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(work())


@pytest.mark.parametrize("loop", LOOPS)
def test_one_iteration_accepts_many_connections(loop, monkeypatch):
    monkeypatch.setattr(http_server, "PER_TURN", 10)
    harness = AcceptorHarness(100)

    async def work() -> None:
        await harness.take()
        harness.close()
        await asyncio.sleep(0)

    run(LOOPS[loop], work)
    assert len(harness.turns) == 100
    # The loop needs an iteration or two to poll, and another to make the connection.
    assert harness.turns[-1] - harness.turns[0] <= 12


@pytest.mark.parametrize("loop", LOOPS)
def test_a_failed_accept_is_retried(loop, monkeypatch):
    monkeypatch.setattr(http_server, "PAUSE_S", 0.001)
    harness = AcceptorHarness(5, errno.EMFILE, errno.ECONNABORTED, errno.ENFILE)

    async def work() -> None:
        await harness.take()
        harness.close()
        await asyncio.sleep(0)

    run(LOOPS[loop], work)
    assert len(harness.turns) == 5
    assert not harness.listener.failures


@pytest.mark.parametrize("loop", LOOPS)
def test_no_connection_is_accepted_after_shutdown(loop):
    harness = AcceptorHarness(0)

    async def work() -> None:
        server = Acceptor(harness.listener, lambda: Taken(harness))
        server.close()
        harness.clients.append(socket.create_connection(harness.listener.getsockname()))
        for _ in range(20):
            await asyncio.sleep(0)
        await server.wait_closed()
        assert not harness.turns
        harness.close()

    run(LOOPS[loop], work)
