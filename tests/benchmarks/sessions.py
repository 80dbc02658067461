"""The time to the first token of a session's next chunk, after other traffic: `python -m
tests.benchmarks.sessions`.

m15 (or `--model m125`), 4 000 tokens and a chunk of 16, one row. Between two chunks, other prompts
evict the blocks that are not kept. Each pair is one chunk with `cache.session_fraction=0` and one
with the default, in one process on the same cores; the ratio is the median over the pairs.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from statistics import median
from typing import Any

from swell.cluster.local import LLM
from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import SamplerParams
from tests.benchmarks import models

SESSION_TOKENS, CHUNK_TOKENS, OTHERS = 4000, 16, 3
WAYS = {"computed again": 0.0, "kept": 0.5}


class Session:
    """A session that grows by a chunk and a token each turn."""

    def __init__(self, llm: LLM) -> None:
        self._core = llm._engine.core
        self._turns = 0
        self._ids = prompt(0)
        self._ask(self._ids, keep=True)

    def turn(self) -> float:
        """Returns the seconds to the first token of the next chunk."""
        self._turns += 1
        for number in range(OTHERS):
            self._ask(prompt(self._turns * OTHERS + number), keep=False)
        self._ids += prompt(-self._turns)[:CHUNK_TOKENS]
        start = time.perf_counter()
        self._ask(self._ids, keep=True)
        return time.perf_counter() - start

    def _ask(self, ids: list[int], *, keep: bool) -> None:
        request = EngineCoreRequest("a", list(ids), SamplerParams(), 1, keep_blocks=keep)
        assert self._core.add_request(request, b"benchmark") is None
        while self._core.has_work:
            self._core.step()


def prompt(number: int) -> list[int]:
    return [(number * 7919 + i * 31) % 30_000 + 10 for i in range(SESSION_TOKENS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--model", default="m15-long")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    shape = models.SHAPES[args.model]
    folder = models.prepare(args.model, models.default_folder())
    options: dict[str, Any] = {
        "cache.memory_bytes": int(2.5 * SESSION_TOKENS) * shape.kv_bytes,
        "model.cpu_threads": args.threads,
        "model.max_model_len": SESSION_TOKENS + 1000,
    }
    with ExitStack() as open_:
        sessions = {
            way: Session(
                open_.enter_context(
                    LLM(str(folder), **options, **{"cache.session_fraction": fraction})
                )
            )
            for way, fraction in WAYS.items()
        }
        times: dict[str, list[float]] = {way: [] for way in sessions}
        for pair in range(args.pairs + 1):
            for way, session in sessions.items():
                took_s = session.turn()
                if pair:  # the first pair is a warm-up
                    times[way].append(took_s)
    again, kept = times["computed again"], times["kept"]
    ratio = median(a / b for a, b in zip(again, kept, strict=True))
    print(f"computed again: {1000 * median(again):.1f} ms")
    print(f"kept: {1000 * median(kept):.1f} ms, {ratio:.1f} times faster")


if __name__ == "__main__":
    main()
