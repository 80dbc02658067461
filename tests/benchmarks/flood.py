"""Many requests at once, and whether `/health` answers meanwhile.

    python -m tests.benchmarks.flood URL [--requests 10000] [--timeout-s S] [--json FILE]

Every request has a connection of its own, opened as fast as this process can. `/health` is polled
on new connections, as a supervisor does. The report has the answers by status, the times of
`/health`, and the values of `Retry-After`. Needs as many file descriptors as requests (`ulimit
-n`), here and in the server.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import time
from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from typing import Any
from urllib.parse import urlsplit

PROBE_EVERY_S = 0.05
SLOW_S = 0.5
WARMUP_S = 2.0
"""The time in which only the probe runs."""
CONNECT_AT_ONCE = 1000
"""The number of connections that this process opens at a time: more would only wait in its own
loop."""


class Flood:
    def __init__(self, url: str, body: bytes, timeout_s: float | None = None) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        head = "POST /v1/completions HTTP/1.1\r\n"
        head += f"Host: {parts.netloc}\r\nConnection: close\r\n"
        if timeout_s is not None:
            head += f"x-request-timeout-s: {timeout_s}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self._request = head.encode() + body
        self.statuses: Counter[str] = Counter()
        self.retry_s: list[int] = []
        self._opening = asyncio.Semaphore(CONNECT_AT_ONCE)

    async def run(self, count: int) -> None:
        await asyncio.gather(*(self._one() for _ in range(count)))

    async def _one(self) -> None:
        try:
            async with self._opening:
                reader, writer = await asyncio.open_connection(*self._address)
                writer.write(self._request)
            answer = await reader.read()
            writer.close()
        except OSError as error:
            self.statuses[type(error).__name__] += 1
            return
        head = answer.partition(b"\r\n\r\n")[0].decode("latin-1").lower()
        self.statuses[head[9:12] or "closed"] += 1
        for line in head.splitlines():
            if line.startswith("retry-after:"):
                self.retry_s.append(int(line.partition(":")[2]))


def probe(url: str, ending: Event, results: Connection) -> None:
    """Polls `/health` in a process of its own, because the flood's loop is busy. Sends the start of
    each probe, relative to the first, and its duration."""
    parts = urlsplit(url)
    times: list[tuple[float, float]] = []
    while not ending.is_set():
        began = time.perf_counter()
        connection = http.client.HTTPConnection(parts.hostname or "127.0.0.1", parts.port or 80)
        connection.request("GET", "/health", headers={"Connection": "close"})
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 200, answer.status
        connection.close()
        times.append((began, time.perf_counter() - began))
        ending.wait(PROBE_EVERY_S)
    results.send([(began - times[0][0], took) for began, took in times])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--tokens", type=int, default=16, help="longest answer")
    parser.add_argument("--timeout-s", type=float, help="the header x-request-timeout-s")
    parser.add_argument("--json", help="write the figures there")
    args = parser.parse_args()
    params = {"model": args.model, "prompt": "upper: abc", "max_tokens": args.tokens}
    flood = Flood(args.url, json.dumps(params).encode(), args.timeout_s)
    spawn = multiprocessing.get_context("spawn")
    ending = spawn.Event()
    receiver, sender = spawn.Pipe(duplex=False)
    prober = spawn.Process(target=probe, args=(args.url, ending, sender))
    prober.start()
    time.sleep(WARMUP_S)
    began = time.perf_counter()
    asyncio.run(flood.run(args.requests))
    seconds = time.perf_counter() - began
    ending.set()
    probes: list[tuple[float, float]] = receiver.recv()
    prober.join()
    health_s = sorted(took for _, took in probes)
    figures: dict[str, Any] = {
        "requests": args.requests,
        "seconds": round(seconds, 2),
        "statuses": dict(flood.statuses),
        "health_probes": len(health_s),
        "health_median_s": round(health_s[len(health_s) // 2], 4),
        "health_longest_s": round(health_s[-1], 4),
        "health_slow_at_and_s": [
            (round(at, 2), round(took, 2)) for at, took in probes if took > SLOW_S
        ],
        "retry_after_s": [min(flood.retry_s), max(flood.retry_s)] if flood.retry_s else None,
    }
    print(json.dumps(figures, indent=2))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file)


if __name__ == "__main__":
    main()
