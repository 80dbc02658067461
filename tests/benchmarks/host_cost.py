"""The host's cost of a step and of a token, without a model."""

from __future__ import annotations

from tests.benchmarks.case import Case, Measured, Setup
from tests.benchmarks.interleaved import OURS, InterleavedRounds
from tests.benchmarks.results import Figure
from tests.benchmarks.worker import Worker

_TOKENS = "tokens"
_MAX_STEP_US = 1500.0
_MAX_TOKEN_US = 20.0
_LINEAR = 1.15
"""The limit of two ratios that would be 1 without noise: the cost of four times the rows over four
times the cost, and the cost of a longer context over that of a short one."""


def run(setup: Setup) -> Measured:
    workers = [
        Worker(OURS, "function.py", ["tests.benchmarks.host", "measure"], setup),
        Worker(_TOKENS, "function.py", ["tests.benchmarks.tokens", "measure_tokens"], setup),
    ]
    with InterleavedRounds(workers) as turns:
        rounds = turns.take(setup.repeats, Worker.turn)

    def step_us(rows: int, context: int) -> list[float]:
        return rounds.series(OURS, f"engine.{rows}.{context}.total")

    figures = [
        Figure("host us/step, 256 rows, 2048 context", step_us(256, 2048), at_most=_MAX_STEP_US),
        Figure(
            "host us/step, 256 rows, 8000 context",
            step_us(256, 8000),
            "128 context",
            step_us(256, 128),
            at_most=_LINEAR,
        ),
        Figure(
            "host us/step, 256 rows",
            step_us(256, 2048),
            "4 x 64 rows",
            [4 * us for us in step_us(64, 2048)],
            at_most=_LINEAR,
        ),
    ]
    figures += [
        Figure(f"text and SSE us/token, {name}", series, at_most=_MAX_TOKEN_US)
        for name, series in rounds.all_series(_TOKENS).items()
        if "streams" in name
    ]
    figures += [
        Figure(f"worker's host us/step, {rows} rows", rounds.series(OURS, f"worker.{rows}.2048"))
        for rows in (1, 64, 256)
    ]
    return Measured(figures, turns.problems)


CASES = {"host": Case("host cost of a step and of a token, no model", run)}
