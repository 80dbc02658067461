"""Decoding after 8 000 tokens against the bytes that it reads, and the gain of a shared prefix."""

from __future__ import annotations

from tests.benchmarks import models
from tests.benchmarks.case import Case, Measured, Setup
from tests.benchmarks.interleaved import OURS, InterleavedRounds
from tests.benchmarks.results import Figure
from tests.benchmarks.worker import Worker

MODEL = "m15-long"
CONTEXT_TOKENS, PREFIX_TOKENS = 8000, 4000
_MEMORY = "memory"


def run(setup: Setup) -> Measured:
    folder = models.prepare(MODEL, setup.models)
    workers = [
        Worker(OURS, "swell_long.py", [folder, CONTEXT_TOKENS, PREFIX_TOKENS], setup),
        Worker(_MEMORY, "memory.py", [], setup),
    ]
    with InterleavedRounds(workers) as turns:
        rounds = turns.take(setup.repeats, Worker.turn)
    shape = models.SHAPES[MODEL]
    read_bytes = shape.weight_bytes + CONTEXT_TOKENS * shape.kv_bytes
    least = [read_bytes / rate / 1e6 for rate in rounds.series(_MEMORY, "gb_per_s")]
    hits, misses = (rounds.series(OURS, key) for key in ("hit_ms", "miss_ms"))
    figures = [
        Figure(
            "decode at 8 000 tokens, ms/token",
            rounds.series(OURS, "decode_ms"),
            "bytes at memory rate",
            least,
            at_most=1.5,
        ),
        Figure("TTFT, ms: prefix of 4 000 not cached", misses, "cached", hits, at_least=10.0),
    ]
    return Measured(figures, turns.problems)


CASES = {"long-context": Case("m15, one row: 8 000 tokens of context, prefix of 4 000", run)}
