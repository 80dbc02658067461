"""Connections that came at once are taken many in a turn of the loop, on every kind of loop."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from swell.cluster.api.server import acceptor
from swell.cluster.api.server.acceptor import Acceptor

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
DEADLINE_S = 30.0


class Listener(socket.socket):
    """Fails as often as it is told."""

    failures: list[OSError]

    def accept(self) -> Any:
        if self.failures:
            raise self.failures.pop()
        return super().accept()


class Taken(asyncio.Protocol):
    """Notes the turn of the loop in which it was made."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._scene.turns.append(self._scene.turn)
        self._scene.transports.append(transport)


class Scene:
    def __init__(self, clients: int, *failures: int) -> None:
        self.turn = 0
        self.turns: list[int] = []
        self.transports: list[asyncio.BaseTransport] = []
        self.listener = Listener()
        self.listener.failures = [OSError(number, "as told") for number in failures]
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
        async with asyncio.timeout(DEADLINE_S):
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
def test_a_turn_takes_many(loop, monkeypatch):
    monkeypatch.setattr(acceptor, "PER_TURN", 10)
    scene = Scene(100)

    async def work() -> None:
        await scene.take()
        scene.close()
        await asyncio.sleep(0)

    run(LOOPS[loop], work)
    assert len(scene.turns) == 100
    # A turn or two pass until the loop looks, and until what was taken is made.
    assert scene.turns[-1] - scene.turns[0] <= 12


@pytest.mark.parametrize("loop", LOOPS)
def test_where_none_can_be_taken_it_is_tried_again(loop, monkeypatch):
    monkeypatch.setattr(acceptor, "PAUSE_S", 0.001)
    scene = Scene(5, errno.EMFILE, errno.ECONNABORTED, errno.ENFILE)

    async def work() -> None:
        await scene.take()
        scene.close()
        await asyncio.sleep(0)

    run(LOOPS[loop], work)
    assert len(scene.turns) == 5
    assert not scene.listener.failures


@pytest.mark.parametrize("loop", LOOPS)
def test_nothing_is_taken_after_the_end(loop):
    scene = Scene(0)

    async def work() -> None:
        server = Acceptor(scene.listener, lambda: Taken(scene))
        server.close()
        scene.clients.append(socket.create_connection(scene.listener.getsockname()))
        for _ in range(20):
            await asyncio.sleep(0)
        await server.wait_closed()
        assert not scene.turns
        scene.close()

    run(LOOPS[loop], work)
