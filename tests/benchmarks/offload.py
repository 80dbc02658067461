"""The time to the first token of a prompt whose prefix was evicted from the KV cache, recomputed or
copied back: `python -m tests.benchmarks.offload`.

m15 (or `--model m125`), a prompt of 4 000 tokens and 16 more, one row. Between two turns of it,
other prompts evict its blocks. Each pair is one turn without tiers and one with each kind of tier,
in one process on the same cores; the ratio is the median over the pairs.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from statistics import median
from typing import Any

from swell.cluster.local import LLM, SamplingParams
from tests.benchmarks import models

PREFIX_TOKENS, OTHERS = 4000, 3
FIRST = SamplingParams(temperature=0, max_tokens=1)
TIERS: dict[str, dict[str, int]] = {
    "computed again": {},
    "host memory": {"cache.offload_bytes": 2_000_000_000},
    "disk": {"cache.offload_disk_bytes": 2_000_000_000},
}


def prompt(number: int) -> list[int]:
    return [(number * 7919 + i * 31) % 30_000 + 10 for i in range(PREFIX_TOKENS + 16)]


def turn(llm: LLM) -> float:
    """Returns the seconds to the first token of a prompt that is repeated after other prompts."""
    for number in range(1, 1 + OTHERS):
        llm.generate([prompt(number)], FIRST)
    start = time.perf_counter()
    llm.generate([prompt(0)], FIRST)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model", default="m15-long")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    shape = models.SHAPES[args.model]
    folder = models.prepare(args.model, models.default_folder())
    room = int(1.5 * PREFIX_TOKENS) * shape.kv_bytes
    options: dict[str, Any] = {
        "cache.memory_bytes": room,
        "model.cpu_threads": args.threads,
        "model.max_model_len": PREFIX_TOKENS + 64,
    }
    with ExitStack() as open_:
        engines = {
            name: open_.enter_context(LLM(str(folder), **options, **tier))
            for name, tier in TIERS.items()
        }
        for llm in engines.values():
            turn(llm)
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(args.pairs):
            for name, llm in engines.items():
                times[name].append(turn(llm))
    base = times.pop("computed again")
    print(f"computed again: {1000 * median(base):.1f} ms")
    for name, found in times.items():
        ratio = median(a / b for a, b in zip(base, found, strict=True))
        print(f"{name}: {1000 * median(found):.1f} ms, {ratio:.1f} times faster")


if __name__ == "__main__":
    main()
