"""Batches that start together, 128 tokens in and 64 out, greedy: one process, no server.

Ours against vLLM and llama.cpp, and against the speed limit that is measured in the same rounds.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from tests.benchmarks import models
from tests.benchmarks.case import PEERS, Case, Measured, Setup
from tests.benchmarks.interleaved import OURS, InterleavedRounds
from tests.benchmarks.results import Figure
from tests.benchmarks.worker import Worker

INPUTS, OUTPUTS = 128, 64
_SCRIPTS = {
    OURS: "swell_offline.py",
    "vllm": "vllm_offline.py",
    "llamacpp": "llamacpp_offline.py",
    "limit": "limit.py",
}


class Batch(NamedTuple):
    """One size, and the minimum ratio of our tokens per second to each reference's."""

    model: str
    rows: int
    at_least: dict[str, float]


BATCHES = (
    Batch("tiny", 64, {"vllm": 2.0, "limit": 1 / 1.3}),
    Batch("m15", 64, {"vllm": 2.0, "limit": 1 / 1.3}),
    Batch("m125", 32, {"vllm": 1.7, "limit": 1 / 1.3}),
    Batch("m15", 1, {"llamacpp": 1.0, "limit": 1 / 1.15}),
    Batch("m125", 1, {"llamacpp": 1.0, "limit": 1 / 1.15}),
)


def run(batch: Batch, setup: Setup) -> Measured:
    """Measures one size."""
    folder = models.prepare(batch.model, setup.models)
    sizes = (batch.rows, INPUTS, OUTPUTS)
    workers = [
        Worker(name, script, [batch.model if name == "limit" else folder, *sizes], setup)
        for name, script in _SCRIPTS.items()
        if setup.interpreter(name)
    ]
    with InterleavedRounds(workers) as turns:
        rounds = turns.take(setup.repeats, Worker.turn)
    figures = [
        Figure(
            "output tokens/s",
            rounds.series(OURS, "tokens_per_s"),
            PEERS[name].title if name in PEERS else name,
            rounds.series(name, "tokens_per_s"),
            at_least=batch.at_least.get(name),
        )
        for name in rounds
        if name != OURS
    ]
    rate = rounds.series("limit", "memory_gb_per_s")
    return Measured([*figures, Figure("memory rate, GB/s", rate)], turns.problems)


CASES = {
    f"offline-{batch.model}-{batch.rows}": Case(
        f"{batch.model}, {batch.rows} at a time, one process", partial(run, batch)
    )
    for batch in BATCHES
}
