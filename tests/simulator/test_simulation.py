"""Random faults in the whole control plane break no law, and a seed determines a run."""

from __future__ import annotations

import gc
import logging
from collections import Counter

import pytest

from tests.simulator.faults import FAULTS
from tests.simulator.kernel.hash_seeds import outputs
from tests.simulator.laws.laws import Run, Verdict, judge
from tests.simulator.scenario import (
    SLOW_STEP_S,
    AtMessage,
    Fault,
    Operation,
    Request,
    Scenario,
    draw,
)

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


def test_a_request_fails_after_one_engine_has_lost_two_workers() -> None:
    requests = (Request(3.436, 2, (0,), 6, 7), Request(3.506, 2, (40,), 1, 8))
    faults = tuple(Fault("lose-worker", at, target=9) for at in (3.53, 3.708))
    run = Run(Scenario(9001001, 1, 3, False, requests, faults, step_s=SLOW_STEP_S))
    verdict = run.judge()
    assert verdict.broken == [] and len(verdict.faults) == 2
    ends = [request.end or "" for request in run.plane.requests]
    assert "2 workers or engines in a row were lost in its steps" in " ".join(ends)


_EXCUSED = {
    "load reports that a loss has delayed, which lasted less than a look": Scenario(
        9001241,
        1,
        2,
        True,
        (Request(3.4976, 1, (12,), 6, 0),),
        (Fault("loss", 3.672155, 5, 0.0268),),
        control_host="host2",
        step_s=SLOW_STEP_S,
        prefill_engines=1,
    ),
    "an engine that ends while its manager is stopped, and a new coordinator lists it": Scenario(
        9000611,
        2,
        3,
        True,
        (),
        (
            Fault("lose-worker", 3.21235, 10, 0.051),
            Fault("hang", 4.39637, 10, 0.058),
            Fault("stop-control", 12.71028, 5, 2.819),
            Fault("kill", 13.0232, 5, 0.05),
        ),
        (Operation(3.6275, "scale", 1),),
        step_s=SLOW_STEP_S,
        slow_load_s=2.0,
    ),
    "a late view, from before an engine joined again and was kept": Scenario(
        9000735,
        2,
        3,
        False,
        (Request(3.87916, 0, (22,), 28, 0, timeout_s=1.3295),),
        (
            Fault("stop-pair", 3.9429, 9, 1.0, changing=True),
            Fault("loss", 3.9439, 5, 1.616),
            Fault("fail-call", 3.8954, 8, 0.0, AtMessage("detach", 1)),
        ),
        (Operation(3.9904, "update_weights", 1), Operation(6.3705, "upgrade", 2)),
        control_host="host1",
        step_s=SLOW_STEP_S,
        no_engine_timeout_s=3.0,
    ),
}


@pytest.mark.parametrize("what", _EXCUSED)
def test_a_law_excuses_each_effect_that_no_process_could_avoid(what: str) -> None:
    assert judge(_EXCUSED[what]).broken == []


def test_each_drawn_pause_has_an_end() -> None:
    for seed in range(9_000_500, 9_000_700):
        kinds = Counter(each.kind for each in draw(seed, tuple(FAULTS)).operations)
        assert kinds["pause"] <= kinds["resume"], seed


def test_a_run_is_the_same_for_every_hash_seed() -> None:
    printed = outputs(_CHECKSUMS, ("0", "4711"))
    assert len(printed) == 1 and printed != {""}
