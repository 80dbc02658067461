"""`python -m tests.benchmarks.ingress_profile`: where the processor time of an ingress goes.

A fake engine answers streamed requests of token ids; the load client is another process. The
processor time of the event loop's thread is measured twice: plainly, and with a profile, which says
how it divides among the stages of the path. Requests of two lengths separate what a request costs
from what a token costs. The fake engine makes one step each `STEP_S`, so that nearly every token is
an event of its own.

The profile makes small functions look more expensive than they are. So compare its shares, and take
absolute times only from the plain measurement.
"""

from __future__ import annotations

import asyncio
import contextlib
import cProfile
import pstats
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import uvloop

from swell.configs.runtime.process import freeze_gc
from tests.benchmarks.servers import Client
from tests.cluster.fake_cluster import FakeCluster, FakeEngine
from tests.cluster.text import tokenizers_for_tests

STREAMS, REQUESTS, INPUT_TOKENS = 16, 128, 16
OUTPUT_TOKENS = (2, 66)
STEP_S = 0.005
VOCAB = 500

STAGES = {
    # Part of a file's path -> the stage that its functions belong to. The first match counts.
    "uvicorn": "HTTP server: uvicorn",
    "/starlette": "routes and middleware: Starlette",
    "/asyncio/": "tasks and timers: asyncio",
    "cluster/api/server": "connection limits and framing",
    "cluster/api/bodies": "body: read, decode, check",
    "cluster/api/answers": "response writer and events",
    "cluster/api/": "handler, context, admission",
    "cluster/text/prompt": "prompt and parameters",
    "cluster/text/params": "prompt and parameters",
    "cluster/text/": "detokenizer and stop strings",
    "cluster/client/requests": "request state and outputs",
    "cluster/client/metrics": "metrics",
    "cluster/client/": "placement and connection",
    "coordinator/": "channel",
}


class Target:
    """The ingress as the load client sees it."""

    def __init__(self, url: str) -> None:
        self.name, self.url = "ingress", url

    def start(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def close(self) -> None: ...


def stage_of(file: str) -> str:
    return next((stage for part, stage in STAGES.items() if part in file), "other")


def stages(profile: cProfile.Profile) -> Counter[str]:
    """Returns the seconds of each stage. A function of C belongs to the stages that call it."""
    found: Counter[str] = Counter()
    stats: Any = pstats.Stats(profile)
    for (file, _line, _name), (_calls, _all, own_s, _total, callers) in stats.stats.items():
        if file != "~" or not callers:
            found[stage_of(file)] += own_s
            continue
        for (caller, _, _), (_, _, caller_s, _) in callers.items():
            found[stage_of(caller)] += caller_s
    return found


@contextlib.asynccontextmanager
async def fake_cluster() -> AsyncIterator[FakeCluster]:
    with tempfile.TemporaryDirectory() as folder:
        tokenizers_for_tests.chat_tokenizer().save_pretrained(folder)
        settings: dict[str, Any] = {"model.name": "m", "cluster.heartbeat_s": 5.0}
        async with FakeCluster(Path(folder), vocab_size=VOCAB, **settings).serving() as cluster:
            yield cluster


@contextlib.contextmanager
def steps(engine: FakeEngine) -> Iterator[None]:
    """In this context, the engine makes a step each `STEP_S`."""
    loop = asyncio.get_running_loop()
    timer = loop.call_soon(lambda: None)

    def step() -> None:
        nonlocal timer
        engine.allow(1)
        timer = loop.call_later(STEP_S, step)

    step()
    try:
        yield
    finally:
        timer.cancel()


async def measure(output_tokens: int, client: Client) -> tuple[float, Counter[str]]:
    """Returns the microseconds of a request on the event loop's thread, and each stage's share of
    the profiled time."""
    sizes = INPUT_TOKENS, output_tokens
    async with fake_cluster() as cluster:
        engine = await cluster.join(0, 0)
        target = Target(f"http://127.0.0.1:{cluster.edge.port}")

        async def load(requests: int) -> float:
            started = time.thread_time()
            await asyncio.to_thread(client.load, target, STREAMS, requests, VOCAB, sizes)
            return time.thread_time() - started

        with steps(engine):
            await load(STREAMS)
            freeze_gc()  # as in an ingress, after its start
            plain_s = await load(REQUESTS)
            profile = cProfile.Profile(time.thread_time)
            with profile:
                await load(REQUESTS)
    found = stages(profile)
    whole = found.total()
    return 1e6 * plain_s / REQUESTS, Counter({stage: s / whole for stage, s in found.items()})


async def main() -> None:
    with tempfile.TemporaryDirectory() as logs, Client(Path(logs)) as client:
        short, long = [await measure(tokens, client) for tokens in OUTPUT_TOKENS]
    more = OUTPUT_TOKENS[1] - OUTPUT_TOKENS[0]
    rows = []
    for stage in short[1] | long[1]:
        request_us, long_us = short[0] * short[1][stage], long[0] * long[1][stage]
        rows.append(((long_us - request_us) / more, request_us, stage))
    print("| stage | us per request | us per token |\n|---|---:|---:|")
    for token_us, request_us, stage in sorted(rows, reverse=True):
        print(f"| {stage} | {request_us:.0f} | {token_us:.1f} |")
    print(f"| all | {short[0]:.0f} | {(long[0] - short[0]) / more:.1f} |")


if __name__ == "__main__":
    uvloop.run(main())
