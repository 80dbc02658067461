"""The effect of long prompts on concurrent streams, with and without an engine that computes
prompts: `python -m tests.benchmarks.prefill_decode`.

Two engines of one thread each, served over HTTP, m15, one cluster after the other. Some clients
stream answers to short prompts, one after the other; meanwhile a prompt of 3 000 tokens arrives
every second. Printed: times between two tokens of the streams, and from a long prompt to its first
token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from itertools import pairwise
from tempfile import TemporaryDirectory

import httpx

from tests.benchmarks import models
from tests.faults.process import Cluster

LONG_TOKENS, ANSWER_TOKENS = 3000, 200
PERCENTILES = (50, 90, 99)


class Traffic:
    """The load on one cluster, for some seconds."""

    def __init__(self, url: str, seconds: float) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=120)
        self._end_s = time.monotonic() + seconds
        self.gaps_s: list[float] = []
        self.first_s: list[float] = []
        self._number = 0

    async def run(self, streams: int) -> None:
        async with self._http:
            await asyncio.gather(self._long_prompts(), *map(self._stream, range(streams)))

    async def _stream(self, number: int) -> None:
        while time.monotonic() < self._end_s:
            times = await self._times([number + 10, 11, 12], ANSWER_TOKENS)
            self.gaps_s += [later - one for one, later in pairwise(times)]

    async def _long_prompts(self) -> None:
        asked = []
        while time.monotonic() < self._end_s:
            self._number += 1
            prompt = [(self._number * 7919 + i * 31) % 30_000 + 10 for i in range(LONG_TOKENS)]
            asked.append(asyncio.create_task(self._ask_long(prompt)))
            await asyncio.sleep(1.0)
        await asyncio.gather(*asked)

    async def _ask_long(self, prompt: list[int]) -> None:
        start = time.monotonic()
        self.first_s.append((await self._times(prompt, 2))[0] - start)

    async def _times(self, prompt: list[int], max_tokens: int) -> list[float]:
        """Returns the time at which each token arrived."""
        asked = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        asked |= {"return_token_ids": True}
        times: list[float] = []
        async with self._http.stream("POST", "/v1/completions", json=asked) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line[6:])["choices"]
                    times += [time.monotonic() for one in choices if one.get("token_ids")]
        return times


def percentiles(values: list[float]) -> str:
    ordered = sorted(values)
    found = [ordered[min(len(ordered) - 1, len(ordered) * each // 100)] for each in PERCENTILES]
    return ", ".join(
        f"p{each} {1000 * value:.1f} ms" for each, value in zip(PERCENTILES, found, strict=True)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--model", default="m15-long")
    args = parser.parse_args()
    folder = models.prepare(args.model, models.default_folder())
    with TemporaryDirectory(prefix="swell-handover-", dir="/dev/shm") as files:
        settings = ("parallel.data=2", "model.cpu_threads=1", "cache.memory_bytes=300000000")
        split = ("parallel.prefill_engines=1", f"cache.handover_folder={files}")
        for name, more in (("both engines do both", ()), ("one computes prompts", split)):
            with Cluster(folder, *settings, *more) as cluster:
                asyncio.run(Traffic(cluster.url, 3.0).run(args.streams))  # a warm-up
                traffic = Traffic(cluster.url, args.seconds)
                asyncio.run(traffic.run(args.streams))
            print(f"{name}: {len(traffic.gaps_s)} tokens")
            print(f"  between two tokens: {percentiles(traffic.gaps_s)}")
            print(f"  to the first token of a long prompt: {percentiles(traffic.first_s)}")


if __name__ == "__main__":
    main()
