"""A client that reads slowly gets its whole answer. One that reads nothing is disconnected."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.api.server.connection import LimitedConnection
from swell.cluster.api.server.http_server import EdgeServer
from swell.cluster.api.server.stalled_reader import CHECKS, StallClock
from swell.configs.schema import ServeConfig
from tests.cluster.fake_cluster import until
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

LIMIT_S = 60.0
STEP_S = 0.9 * LIMIT_S
"""Slightly less than the time for which a client may read nothing."""
ANSWER_BYTES = 16 << 20
READ_BYTES = 256 << 10


class HandTimer:
    def __init__(self, when_s: float, callback: Callable[..., object], args: Any) -> None:
        self._when_s, self._callback, self._args = when_s, callback, args
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def when(self) -> float:
        return self._when_s

    def run(self) -> None:
        if not self._cancelled:
            self._callback(*self._args)


class HandLoop:
    """The running loop with a clock that the test moves."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._now_s = 1000.0
        self._timers: list[tuple[float, int, HandTimer]] = []
        self._number = itertools.count()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def time(self) -> float:
        return self._now_s

    def call_at(self, when_s: float, callback: Callable[..., object], *args: Any) -> HandTimer:
        timer = HandTimer(when_s, callback, args)
        heapq.heappush(self._timers, (when_s, next(self._number), timer))
        return timer

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> HandTimer:
        return self.call_at(self._now_s + delay_s, callback, *args)

    def advance(self, time_s: float) -> None:
        end_s = self._now_s + time_s
        while self._timers and self._timers[0][0] <= end_s:
            self._now_s, _, timer = heapq.heappop(self._timers)
            timer.run()
        self._now_s = end_s


class Download:
    """One client of a large answer. The test moves the server's clock."""

    def __init__(self, edge: EdgeServer, client: socket.socket, loop: HandLoop) -> None:
        self.edge, self.client, self.loop = edge, client, loop
        self.read_bytes = 0

    @property
    def connection(self) -> LimitedConnection | None:
        found = [*self.edge._server.server_state.connections]
        return found[0] if found else None  # type: ignore[return-value]

    async def read(self, size: int = READ_BYTES) -> bytes:
        """Reads some bytes and waits until the server's kernel has taken more data in exchange."""
        before = self._taken()
        data = b""
        async with asyncio.timeout(HANG_S):
            while len(data) < size:
                part = await self.loop.sock_recv(self.client, size - len(data))
                if not part:
                    break
                data += part
        self.read_bytes += len(data)
        await until(lambda: not self._has_unsent() or self._taken() != before)
        return data

    def _has_unsent(self) -> bool:
        return self.connection is not None and self.connection._has_unsent()

    def _taken(self) -> int:
        found = self.connection
        return found._stalled._sent().taken_bytes if found is not None else -1


def download(
    scenario: Callable[[Download], Any],
    monkeypatch: pytest.MonkeyPatch,
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
    *,
    close: bool,
) -> None:
    """Runs the scenario. If `close`, the connection is closed after the answer."""

    async def run() -> None:
        loop = HandLoop()
        made = LimitedConnection.__init__

        def with_hand_loop(self: LimitedConnection, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **{**kwargs, "_loop": loop})

        monkeypatch.setattr(LimitedConnection, "__init__", with_hand_loop)

        async def large(scope: Any, receive: Any, send: Any) -> None:
            headers = [(b"content-length", b"%d" % ANSWER_BYTES)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            half = b"a" * (ANSWER_BYTES // 2)
            await send({"type": "http.response.body", "body": half, "more_body": True})
            await send({"type": "http.response.body", "body": half})

        limits = ServeConfig(transfer_timeout_s=LIMIT_S, idle_timeout_s=10**6)
        edge = EdgeServer(large, "127.0.0.1", 0, 1, limits)
        edge._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # inherited
        await edge.start()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", edge.port))
            end = b"Connection: close\r\n" if close else b""
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\n" + end + b"\r\n")
            one = Download(edge, client, loop)
            await until(lambda: one.connection is not None and one.connection.flow.write_paused)
            await scenario(one)
        await edge.stop()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(run())


loops = pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])


@loops
@pytest.mark.parametrize("close", [False, True])
def test_a_steady_slow_reader_gets_its_whole_answer(
    monkeypatch: pytest.MonkeyPatch, factory: Any, close: bool
) -> None:
    async def scenario(one: Download) -> None:
        head = await one.read()
        one.read_bytes -= head.index(b"\r\n\r\n") + 4
        while one.read_bytes < ANSWER_BYTES:
            one.loop.advance(STEP_S)
            assert await one.read(min(READ_BYTES, ANSWER_BYTES - one.read_bytes))

    download(scenario, monkeypatch, factory, close=close)


@loops
@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("read_bytes", [0, ANSWER_BYTES // 2, ANSWER_BYTES - (6 << 20)])
def test_a_client_that_stops_reading_is_disconnected_wherever_it_stops(
    monkeypatch: pytest.MonkeyPatch, factory: Any, close: bool, read_bytes: int
) -> None:
    async def scenario(one: Download) -> None:
        while one.read_bytes < read_bytes:
            await one.read()
        async with asyncio.timeout(HANG_S):
            while one.connection is not None:
                one.loop.advance(LIMIT_S / CHECKS)
                await asyncio.sleep(0.001)

    download(scenario, monkeypatch, factory, close=close)


EVENT = b"e" * 2048
EVENTS_BYTES = 256 << 10
"""Much less than the buffer of the server's kernel, and more than that of the client's."""


@loops
@pytest.mark.parametrize("reads", [True, False])
def test_a_client_that_reads_no_small_events_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, factory: Any, reads: bool
) -> None:
    """The events fit into the kernel's buffer, so the server never waits to write."""

    async def run() -> None:
        loop, has_ended, waiting = HandLoop(), asyncio.Event(), asyncio.Event()

        made = LimitedConnection.__init__

        def with_hand_loop(self: LimitedConnection, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **{**kwargs, "_loop": loop})

        monkeypatch.setattr(LimitedConnection, "__init__", with_hand_loop)

        async def events(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(EVENTS_BYTES // len(EVENT)):
                await send({"type": "http.response.body", "body": EVENT, "more_body": True})
            waiting.set()
            while (await receive())["type"] != "http.disconnect":
                pass
            has_ended.set()

        limits = ServeConfig(transfer_timeout_s=LIMIT_S)
        edge = EdgeServer(events, "127.0.0.1", 0, 1, limits)
        edge._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        await edge.start()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 10)
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", edge.port))
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await waiting.wait()
            found = [*edge._server.server_state.connections]
            connection: LimitedConnection = found[0]  # type: ignore[assignment]
            assert not connection.flow.write_paused
            read_bytes = 0
            while reads and read_bytes < EVENTS_BYTES:
                read_bytes += len(await loop.sock_recv(client, 1 << 20))
            await until(lambda: connection._stalled._sent().has_left is not reads)
            loop.advance(2 * LIMIT_S)
            await asyncio.sleep(0.01)
            assert has_ended.is_set() is not reads
        await edge.stop()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(0, 2)), max_size=40))
def test_only_an_unchanged_count_is_stalled(looks: list[tuple[float, int]]) -> None:
    clock, now_s, count, changed_s = StallClock(LIMIT_S, 0.0, 0), 0.0, 0, 0.0
    for pause_s, more in looks:
        now_s, count = now_s + pause_s, count + more
        changed_s = now_s if more else changed_s
        assert clock.is_stalled(now_s, count) == (now_s - changed_s >= LIMIT_S)
