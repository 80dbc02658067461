"""Random faults in the whole control plane break no law, and a seed determines a run."""

from __future__ import annotations

import gc
import logging

import pytest

from tests.simulator.faults import FAULTS
from tests.simulator.kernel.hash_seeds import outputs
from tests.simulator.laws.laws import Verdict, judge
from tests.simulator.scenario import draw

_CHECKSUMS = """
from tests.simulator.test_simulation import run_range
print([(verdict.checksum, verdict.events, verdict.faults) for verdict in run_range(0, 12)])
"""


def run_range(first: int, count: int) -> list[Verdict]:
    return [judge(draw(seed, tuple(FAULTS))) for seed in range(first, first + count)]


@pytest.mark.parametrize(
    "first",
    [0, 100, *(pytest.param(first, marks=pytest.mark.slow_variants) for first in (300, 400, 500))],
)
def test_random_faults_break_no_law(first: int) -> None:
    """To debug a seed that breaks a law: `python -m tests.simulator --one SEED --shrink`."""
    gc.disable()
    logging.disable(logging.CRITICAL)
    try:
        verdicts = dict(enumerate(run_range(first, 100), first))
    finally:
        logging.disable(logging.NOTSET)
        gc.enable()
    assert {seed: verdict.broken for seed, verdict in verdicts.items() if verdict.broken} == {}
    happened = {line.split()[1] for verdict in verdicts.values() for line in verdict.faults}
    assert happened - {"poison"} == set(FAULTS), "a fault never happens"


def test_a_run_is_the_same_for_every_hash_seed() -> None:
    printed = outputs(_CHECKSUMS, ("0", "4711"))
    assert len(printed) == 1 and printed != {""}
