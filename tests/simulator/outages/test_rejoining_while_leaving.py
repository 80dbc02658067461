"""A leaving engine is not known to a coordinator that has restarted, and joins again."""

from __future__ import annotations

from swell.coordinator.roster import MemberState, Roster
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import SLOW_STEP_S, AtMessage, Fault, Operation, Scenario


def test_an_engine_that_leaves_joins_again_as_a_leaving_one() -> None:
    faults = (
        Fault("stop-control", 3.584435369864127, 9, 14.511355398321687),
        Fault(
            "black-hole",
            3.585435369864127,
            3,
            5.779032936486736,
            AtMessage("CoordinatorHeartbeat", 1),
            changing=True,
        ),
    )
    scenario = Scenario(
        seed=4060,
        engines=3,
        ingresses=2,
        expert=True,
        requests=(),
        faults=faults,
        operations=(Operation(5.576377303572989, "scale", 1),),
        control_host="host2",
        step_s=SLOW_STEP_S,
        rooms=(0, 3, 3),
        slow_load_s=6.0,
    )
    run = Run(scenario)
    again: list[MemberState] = []

    def on_roster(before: Roster, after: Roster, _kept: frozenset[int]) -> None:
        if before.epoch:
            known = {member.incarnation for member in before.members}
            again.extend(m.state for m in after.members if m.incarnation not in known)

    run.plane.on_roster.append(on_roster)
    assert run.judge().broken == []
    assert len(run.plane.coordinators) == 2 and again == [MemberState.LEAVING]
