"""A coordinator is stopped while an engine is told to leave, and another manager takes over. The
engine's time to finish starts when it gets no more requests, also if nobody could tell it to leave
before."""

from __future__ import annotations

from tests.simulator.laws.laws import Run
from tests.simulator.scenario import SLOW_STEP_S, Fault, Operation, Request, Scenario

_STOPPED_UNTIL_S = 16.85


def test_an_engine_without_a_leave_message_has_its_whole_drain_time() -> None:
    requests = [Request(15.0 + 0.05 * index, 0, (index,), 300, index) for index in range(9)]
    faults = (
        Fault("stop-control", 4.05, 0, _STOPPED_UNTIL_S - 4.05),
        Fault("second-manager", 10.25, 0, 12.5),
    )
    scenario = Scenario(
        seed=1,
        engines=3,
        ingresses=1,
        expert=False,
        requests=tuple(requests),
        faults=faults,
        operations=(Operation(9.2, "scale", 1),),
        control_host="host1",
        step_s=SLOW_STEP_S,
    )
    run = Run(scenario)
    assert run.judge().broken == []
    happened = [line.split()[1] for line in run.faults.happened]
    assert happened == ["stop-control", "second-manager"]
