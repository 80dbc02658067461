"""A restarted coordinator does not hear an engine in time, because its connection delivers nothing.
The engine joins again, and the others form a group with it."""

from __future__ import annotations

from tests.simulator.laws.laws import Run
from tests.simulator.scenario import SLOW_STEP_S, Fault, Operation, Scenario


def test_an_engine_missed_by_the_recovery_rejoins() -> None:
    faults = (Fault("black-hole", 9.72, 7, 3.5), Fault("kill-control", 10.94))
    operations = Operation(3.35, "scale", 1), Operation(10.22, "scale", 4)
    run = Run(Scenario(761, 3, 2, True, (), faults, operations, step_s=SLOW_STEP_S))
    assert run.judge().broken == []
    hit, *_ = run.faults.happened
    assert "black-hole sim-engine-0" in hit and "host0:20000" in hit, "the link to the coordinator"
