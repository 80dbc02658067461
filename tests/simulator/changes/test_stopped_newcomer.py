"""Two engines are added to a group that shares experts, and one of them is stopped when it is
ready, before it joins."""

from __future__ import annotations

from tests.simulator.laws.laws import Run
from tests.simulator.scenario import Fault, Operation, Request, Scenario

_STOPPED_S = 31.4


def test_the_group_forms_without_a_silent_newcomer() -> None:
    """The engine has introduced itself, so its silence is noticed as soon as that of any other
    engine."""
    scenario = Scenario(
        72452,
        1,
        1,
        True,
        (Request(7.953691030579083, 0, (47,), 1, 5),),
        (Fault("stop", 5.054074085660636, 11, _STOPPED_S),),
        (Operation(3.7759462587896744, "scale", 3),),
        control_host="host0",
    )
    run = Run(scenario)
    verdict = run.judge()
    assert [line.split()[1] for line in verdict.faults] == ["stop"]
    assert "sim-engine-0" not in verdict.faults[0], "it hits a newcomer"
    assert verdict.broken == []
