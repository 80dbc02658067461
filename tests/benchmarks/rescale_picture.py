"""Draws the picture of README: tokens per second while the cluster changes.

    python -m tests.benchmarks.rescale_picture docs/lab/rescale.svg

A cluster of one engine serves closed-loop streams. Meanwhile engines are added, one is killed, and
engines are removed. Every answer is compared with that of the undisturbed cluster.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.benchmarks.machine import machine, today
from tests.faults.process import Cluster

NANO = Path(__file__).parents[2] / "configs" / "models" / "nano"
STREAMS = 16
PROMPTS = tuple(f"count from {first} to {first + 25}" for first in range(3, 3 + STREAMS))
BIN_S = 0.5
QUIET_S = 6.0
"""The time before, between and after the events."""
CHANGE_S = 120.0
ENGINE = "EngineActor"
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 860, 300, 64, 56, 40
"""Pixels of the picture; the last three are margins."""


@dataclass
class Record:
    """A record of the run; times are seconds since the start of the load."""

    started: float = field(default_factory=time.monotonic)
    tokens: list[float] = field(default_factory=list)
    """The time at which each token arrived."""
    events: list[tuple[float, str]] = field(default_factory=list)
    answers: int = 0
    wrong: int = 0
    failed: int = 0

    def now(self) -> float:
        return time.monotonic() - self.started


async def stream(client: httpx.AsyncClient, prompt: str) -> AsyncIterator[str]:
    """Yields the pieces of one streamed answer. Raises ValueError for an error event."""
    body = {
        "model": "nano",
        "messages": [{"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": 120,
        "stream": True,
    }
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                yield event["choices"][0]["delta"].get("content") or ""


async def load(
    client: httpx.AsyncClient, prompt: str, expected: str, record: Record, stop: asyncio.Event
) -> None:
    while not stop.is_set():
        text = ""
        try:
            async for piece in stream(client, prompt):
                record.tokens.append(record.now())
                text += piece
        except (httpx.HTTPError, ValueError):
            record.failed += 1
        record.wrong += text != expected
        record.answers += 1


async def scale(client: httpx.AsyncClient, record: Record, engines: int) -> None:
    record.events.append((record.now(), f"scale to {engines}"))
    (await client.post("/admin/scale", json={"engines": engines})).raise_for_status()
    await until_whole(client, record, engines, f"{engines} serve")


async def until_whole(client: httpx.AsyncClient, record: Record, engines: int, text: str) -> None:
    async with asyncio.timeout(CHANGE_S):
        while True:
            state = (await client.get("/admin/cluster")).json()
            if len(state["engines"]) == engines and state["rescale"]["phase"] == "idle":
                break
            await asyncio.sleep(0.1)
    record.events.append((record.now(), text))
    await asyncio.sleep(QUIET_S)


async def measure(cluster: Cluster) -> Record:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=120, limits=limits) as client:
        expected = ["".join([piece async for piece in stream(client, each)]) for each in PROMPTS]
        record, stop = Record(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            for prompt, text in zip(PROMPTS, expected, strict=True):
                group.create_task(load(client, prompt, text, record, stop))
            await asyncio.sleep(QUIET_S)
            await scale(client, record, 3)
            os.kill(cluster.named(ENGINE)[-1], signal.SIGKILL)
            record.events.append((record.now(), "kill an engine"))
            await asyncio.sleep(1)
            await until_whole(client, record, 3, "3 serve")
            await scale(client, record, 1)
            stop.set()
    return record


def draw(record: Record) -> str:
    """Returns an SVG: tokens per second in bins of BIN_S, and a line for each event."""
    bins = int(max(record.tokens) / BIN_S)
    rates = [0.0] * bins
    for when in record.tokens:
        if (index := int(when / BIN_S)) < bins:
            rates[index] += 1 / BIN_S
    top, span_s = 1.25 * max(rates), bins * BIN_S
    bottom = HEIGHT - BOTTOM

    def x(seconds: float) -> float:
        return round(LEFT + seconds / span_s * (WIDTH - LEFT - 16), 1)

    def y(rate: float) -> float:
        return round(bottom - rate / top * (bottom - TOP), 1)

    points = " ".join(f"{x((i + 0.5) * BIN_S)},{y(rate)}" for i, rate in enumerate(rates))
    step = 10 ** (len(str(int(top))) - 1)
    parts = [
        f'<line x1="{LEFT}" x2="{WIDTH - 16}" y1="{y(rate)}" y2="{y(rate)}" stroke="#ddd"/>'
        f'<text x="{LEFT - 6}" y="{y(rate) + 4}" text-anchor="end">{rate}</text>'
        for rate in range(0, int(top), step)
    ]
    parts += [
        f'<text x="{x(s)}" y="{bottom + 16}" text-anchor="middle">{s} s</text>'
        for s in range(0, int(span_s), 10)
    ]
    for number, (when, text) in enumerate(record.events):
        parts.append(
            f'<line x1="{x(when)}" x2="{x(when)}" y1="{TOP}" y2="{bottom}" stroke="#c60" '
            'stroke-dasharray="4 3"/>'
            f'<text x="{x(when) + 4}" y="{TOP + 12 + 14 * (number % 2)}" fill="#a40">{text}</text>'
        )
    title = (
        f"{record.answers} answers, {record.failed} failed, {record.wrong} different from an "
        "undisturbed run"
    )
    note = f"output tokens per second; nano, {STREAMS} streams, {machine()['processor']}, {today()}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<text x="{LEFT}" y="22" font-size="15" font-weight="bold">{title}</text>',
            f'<text x="{LEFT}" y="42" fill="#555">{note}</text>',
            *parts,
            f'<polyline points="{points}" fill="none" stroke="#06c" stroke-width="2"/>',
            "</svg>\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    args = parser.parse_args()
    with Cluster(NANO, "model.dtype=float32") as cluster:
        record = asyncio.run(measure(cluster))
    args.picture.write_text(draw(record))
    print(f"{record.answers} answers, {record.failed} failed, {record.wrong} wrong")


if __name__ == "__main__":
    main()
