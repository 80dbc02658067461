"""The time from a computed prompt to the first token on another engine: `python -m
tests.benchmarks.handover`.

m15 (or `--model m125`), a prompt of 4 000 tokens and 16 more, one row, files in `--folder`
(/dev/shm). Each pair is one prompt that the second engine computes itself, and one whose KV it
reads. The cost of writing for the first engine is measured against the same prompt without a
handover. Everything runs in one process on the same cores; ratios are medians over the pairs.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from swell.cluster.local import LLM
from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import SamplerParams
from tests.benchmarks import models

PROMPT_TOKENS, MORE_TOKENS, BLOCK_TOKENS = 4000, 16, 16


def prompt(number: int) -> list[int]:
    return [(number * 7919 + i * 31) % 30_000 + 10 for i in range(PROMPT_TOKENS + MORE_TOKENS)]


def seconds(llm: LLM, ids: list[int], max_tokens: int, **fields: str) -> float:
    """Returns the seconds that one request takes."""
    core = llm._engine.core
    start = time.perf_counter()
    request = EngineCoreRequest("a", ids, SamplerParams(), max_tokens, **fields)  # type: ignore[arg-type]
    assert core.add_request(request, b"benchmark") is None
    while core.has_work:
        core.step()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model", default="m15-long")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", default="/dev/shm")
    args = parser.parse_args()
    folder = models.prepare(args.model, models.default_folder())
    kv_bytes = models.SHAPES[args.model].kv_bytes
    computed, read, plain, written = [list[float]() for _ in range(4)]
    with TemporaryDirectory(prefix="swell-handover-", dir=args.folder) as files:
        options: dict[str, Any] = {
            "cache.memory_bytes": int(1.5 * PROMPT_TOKENS) * kv_bytes,
            "cache.handover_folder": files,
            "model.cpu_threads": args.threads,
            "model.max_model_len": PROMPT_TOKENS + 64,
        }
        with LLM(str(folder), **options) as first, LLM(str(folder), **options) as second:
            for pair in range(args.pairs + 1):
                one, two, name = prompt(2 * pair), prompt(2 * pair + 1), f"{pair:032x}"
                whole = one[:PROMPT_TOKENS]
                write_s = seconds(first, whole, 1, hand_over=name)
                read_s = seconds(second, one, 1, handed_over=name)
                plain_s = seconds(first, two[:PROMPT_TOKENS], 1)
                compute_s = seconds(second, two, 1)
                if pair:  # the first pair is a warm-up
                    for found, took_s in zip(
                        (written, read, plain, computed),
                        (write_s, read_s, plain_s, compute_s),
                        strict=True,
                    ):
                        found.append(took_s)
    ratio = median(a / b for a, b in zip(computed, read, strict=True))
    cost = median(a / b for a, b in zip(written, plain, strict=True))
    print(f"computed by the second engine: {1000 * median(computed):.1f} ms to the first token")
    print(f"read: {1000 * median(read):.1f} ms, {ratio:.1f} times faster")
    print(f"the first engine: {1000 * median(written):.1f} ms, {cost:.2f} of a prompt alone")
    print(f"{kv_bytes * PROMPT_TOKENS / 2**20:.0f} MiB a prompt")


if __name__ == "__main__":
    main()
