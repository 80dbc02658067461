"""Measures how long one request blocks the event loop of an ingress: the longest gap between the
ticks of a task in that loop, while a client on a thread sends bytes. Time in which the loop waits
for a core does not count.

The client is a plain socket: its calls do not hold the GIL, so only the time of the server is
measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from swell.configs.runtime.process import freeze_gc
from swell.coordinator import roster as rosters
from tests.cluster.fake_cluster import UNLIMITED_STEPS, FakeCluster, FakeEngine
from tests.support.deadlines import HANG_S

TICK_S = 0.001
MAX_MODEL_LEN = 131_072


class Instant(NamedTuple):
    """A moment of the measured loop, in seconds."""

    wall_s: float
    cpu_s: float
    """Processor time of this process so far."""
    queued_s: float
    """Time that the thread of the loop has waited for a core so far."""


def stall_s(early: Instant, late: Instant) -> float:
    """Returns how long the loop was blocked between two ticks.

    The time in which its thread waits for a core does not count, because that depends on other
    threads and processes. The processor time of this process is an upper bound: a thread with the
    GIL blocks the loop too, but not while that thread waits for a core itself.
    """
    ran_s = late.wall_s - early.wall_s - (late.queued_s - early.queued_s)
    return min(ran_s, late.cpu_s - early.cpu_s)


class LoopStallMonitor:
    """A task in the measured loop. `longest_s` is the longest stall since `reset`. Create it in the
    thread of the loop."""

    def __init__(self) -> None:
        self._stats = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self.longest_s = 0.0
        self._last = self._now()

    def reset(self) -> None:
        self.longest_s, self._last = 0.0, self._now()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self._now()
            self.longest_s = max(self.longest_s, stall_s(self._last, now))
            self._last = now

    def _now(self) -> Instant:
        """Returns the current instant, without queued time on a system that does not count it."""
        queued_ns = 0
        with contextlib.suppress(OSError):
            _, queued_ns, _ = map(int, self._stats.read_bytes().split())
        return Instant(time.perf_counter(), time.process_time(), queued_ns / 1e9)


class StallHarness:
    """A cluster of one ingress and one engine, with a `LoopStallMonitor` in the loop of the
    ingress. The engine never answers unless it has a script."""

    def __init__(self, cluster: FakeCluster, engine: FakeEngine) -> None:
        self.cluster = cluster
        self.engine = engine
        self.stall_monitor = LoopStallMonitor()
        url = cluster.client.base_url
        self.address = (url.host, url.port)

    async def longest_stall(self, request: bytes) -> tuple[float, int, bytes]:
        """Returns the longest gap in seconds while this request is served, its status and the first
        bytes of its answer. Status and bytes are 0 and empty if the request reached an engine that
        never answers."""
        await asyncio.sleep(5 * TICK_S)
        self.stall_monitor.reset()
        status, start = await asyncio.to_thread(self._exchange, request)
        await asyncio.sleep(5 * TICK_S)
        return self.stall_monitor.longest_s, status, start

    def _exchange(self, request: bytes) -> tuple[int, bytes]:
        arrived, start = len(self.engine.arrived), b""
        with socket.create_connection(self.address, timeout=HANG_S) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(request)
            ready = select.poll()
            ready.register(connection, select.POLLIN)
            deadline_s = time.monotonic() + HANG_S
            while time.monotonic() < deadline_s:
                if not ready.poll(50):
                    if self.engine.credit_steps or len(self.engine.arrived) == arrived:
                        continue
                    time.sleep(0.1)  # the rest of its responses, if the bytes hold several requests
                    return 0, b""
                try:
                    part = connection.recv(1 << 16)
                except ConnectionError:
                    break
                if not part:
                    break
                start = (start + part)[:4000]
            else:
                raise TimeoutError("no answer, and no engine got the request")
        return (int(start.split(b" ")[1]) if start else 0), start


@contextlib.asynccontextmanager
async def stall_harness(
    folder: Path, script: list[int] | None = None, **settings: object
) -> AsyncIterator[StallHarness]:
    """Yields a running `StallHarness`. With a `script` the engine answers every request with it."""
    settings.setdefault("cache.block_tokens", 16)
    async with FakeCluster(folder, script, **settings).serving() as cluster:
        engine = cluster.start(0, UNLIMITED_STEPS if script else 0)
        engine.member = msgspec.structs.replace(engine.member, max_model_len=MAX_MODEL_LEN)
        await cluster.change(lambda now: rosters.join(now, [engine.member]))
        freeze_gc()
        place = StallHarness(cluster, engine)
        ticking = asyncio.create_task(place.stall_monitor.run())
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
