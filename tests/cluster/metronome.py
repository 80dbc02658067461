"""How long one ingress keeps others waiting: the longest gap between the ticks of a task in its
loop, while a client on a thread sends it bytes.

The client is a plain socket: its calls hold no interpreter lock, so what is measured is the
server's part.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from swell.configs.process import keep_what_is_here
from swell.coordinator import roster as rosters
from tests.cluster.fake_cluster import FakeCluster, FakeEngine

TICK_S = 0.001
MAX_MODEL_LEN = 131_072
ANSWER_S = 10.0


class Metronome:
    """Ticks while it is entered; `longest_s` is the longest gap since `reset`."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._last_s = time.perf_counter()

    def reset(self) -> None:
        self.longest_s, self._last_s = 0.0, time.perf_counter()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.perf_counter()
            self.longest_s = max(self.longest_s, now_s - self._last_s)
            self._last_s = now_s


class Hall:
    """A cluster of one ingress and one engine that never answers, and its metronome."""

    def __init__(self, cluster: FakeCluster, engine: FakeEngine) -> None:
        self.cluster = cluster
        self.engine = engine
        self.metronome = Metronome()
        url = cluster.client.base_url
        self.address = (url.host, url.port)

    async def gap_of(self, request: bytes, *, answered: bool = True) -> tuple[float, int, bytes]:
        """The longest gap while this request is served, the answer's status and its beginning. One
        that an engine would answer is given up once the engine has all of it."""
        await asyncio.sleep(5 * TICK_S)
        self.metronome.reset()
        status, start = await asyncio.to_thread(self._exchange, request, answered)
        await asyncio.sleep(5 * TICK_S)
        return self.metronome.longest_s, status, start

    def _exchange(self, request: bytes, answered: bool) -> tuple[int, bytes]:
        before = len(self.engine.arrived)
        with socket.create_connection(self.address, timeout=ANSWER_S) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(request)
            if not answered:
                deadline_s = time.monotonic() + ANSWER_S
                while len(self.engine.arrived) == before and time.monotonic() < deadline_s:
                    time.sleep(0.01)
                time.sleep(0.3)
                return (200 if len(self.engine.arrived) > before else 0), b""
            start = b""
            with contextlib.suppress(ConnectionError):
                while part := connection.recv(1 << 16):
                    if len(start) < 4000:
                        start += part
        return int(start.split(b" ")[1]) if start else 0, start


@contextlib.asynccontextmanager
async def hall(folder: Path, **settings: object) -> AsyncIterator[Hall]:
    async with FakeCluster(folder, **settings).serving() as cluster:
        engine = cluster.start(0, 0)
        engine.member = msgspec.structs.replace(engine.member, max_model_len=MAX_MODEL_LEN)
        await cluster.change(lambda now: rosters.join(now, [engine.member]))
        keep_what_is_here()
        place = Hall(cluster, engine)
        ticking = asyncio.create_task(place.metronome.run())
        try:
            yield place
        finally:
            ticking.cancel()


def post(path: str, body: bytes | dict[str, Any], *headers: str) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Connection: close",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content
