"""An engine that is slow to terminate does not prolong the drain of another one."""

from __future__ import annotations

from tests.simulator.laws.laws import Run
from tests.simulator.scenario import SLOW_STEP_S, Fault, Operation, Request, Scenario


def test_a_drain_ends_in_time_while_another_engine_terminates() -> None:
    scenario = Scenario(
        0,
        engines=3,
        ingresses=1,
        expert=False,
        requests=tuple(Request(3.1 + 0.01 * i, 0, (i,), 300, i) for i in range(12)),
        faults=(Fault("stop", 3.6, time_s=20.0, changing=True),),
        operations=(Operation(3.5, "drain", 2), Operation(4.0, "drain", 1)),
        step_s=SLOW_STEP_S,
        rooms=(0, 3, 3),
    )
    verdict = Run(scenario).judge()
    assert not verdict.broken
    assert any("stop sim-engine-2" in line for line in verdict.faults)
