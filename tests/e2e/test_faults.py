"""Faults of one or several processes: every answer finishes, and equals that of a cluster without
faults.

These tests are a part of the matrix in docs/lab/fault-matrix.md; `make fault-matrix` runs all of
it. A cell waits until the affected process is gone and has a successor (or, if the process was only
slow, until no process has changed for a while), so a fault without effect cannot pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.e2e.cluster import NANO
from tests.faults import fault_types, load, moments, trial
from tests.faults.fault_types import Fault
from tests.faults.load import SHORT_DECODE
from tests.faults.trial import Cell, Setup, Trial
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

STREAMS = 8
BURST_EVERY_S = 2.0
STALL = "cluster.stall_timeout_s=3"
DENSE = ["parallel.data=2", "parallel.tensor=2", STALL]
EXPERT = ["parallel.data=2", "parallel.expert=true", STALL]
SIZES = [
    fault_types.scale(f"scale-to-{size}", size - before) for before, size in pairwise((2, 3, 1))
]

"""Faults after which another engine must continue the requests in flight."""


@pytest.fixture(scope="module", autouse=True)
def patience() -> Iterator[None]:
    """Longer time limits and a shorter slowdown, since other tests run at the same time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "RECOVER_S", HANG_S)
        patch.setattr(load, "_ANSWER_S", 300.0)
        patch.setattr(fault_types, "_SLOW_S", 0.3)
        yield


@pytest.fixture(scope="module")
def dense() -> Iterator[Trial]:
    with Trial(Setup("dense", str(NANO), DENSE), STREAMS, seed=0) as made:
        yield made


@pytest.fixture(scope="module")
def expert() -> Iterator[Trial]:
    model = str(NANO.parent / "nano-moe")
    with Trial(Setup("expert", model, EXPERT, waves=True), STREAMS, seed=0) as made:
        yield made


def assert_kept(cell: Cell) -> None:
    """Asserts that the answers are correct, and that some were in flight during the fault."""
    assert cell.result.failed == cell.result.wrong == cell.result.cut == 0, cell
    assert cell.problems == [], cell
    assert cell.recover_s is not None
    assert cell.result.answers >= STREAMS
    assert cell.in_flight > 0 or cell.moment in ("idle", "wave-end")
    if cell.fault == "kill-engine" and cell.num_hit:
        assert cell.resubmitted > 0, cell


@pytest.mark.parametrize(
    ("fault", "moment"),
    [
        ("kill-engine", "rescale-prepare"),
        pytest.param("stop-worker", "prefill", marks=pytest.mark.slow_variants),
    ],
)
def test_dense(dense: Trial, fault: str, moment: str) -> None:
    assert_kept(dense.cell(fault_types.named(fault), moments.named(moment)))


def test_dense_one_after_the_other(dense: Trial) -> None:
    names = ("kill-worker", "kill-engine+manager", "stop-store", "kill-controller")
    assert_row_kept(dense, *map(fault_types.named, names))


def test_expert_parallel_at_the_start_of_a_wave(expert: Trial) -> None:
    cell = expert.cell(fault_types.named("kill-engine"), moments.named("wave-start"))
    assert_kept(cell)
    assert cell.resubmitted > 0, cell


def test_expert_parallel_one_after_the_other(expert: Trial) -> None:
    """Scales as well; `one_engine/test_lifecycle.py` tests this without expert parallelism."""
    names = ("stop-worker", "kill-coordinator", "slow-engine", "kill-engines+manager+coordinator")
    assert_row_kept(expert, *map(fault_types.named, names), *SIZES)


def assert_row_kept(trial: Trial, *faults: Fault) -> None:
    """Applies the faults in turn under one load, which is cheaper than a cell for each fault."""
    name = ", ".join(fault.name for fault in faults)
    cell = trial.row(name, faults, SHORT_DECODE, BURST_EVERY_S)
    assert_kept(cell)
    assert cell.resubmitted > 0, cell
