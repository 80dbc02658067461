"""A coordinator terminates after it has removed an engine that leaves. Its successor lists the
engine again, because the engine reports until it has replaced a worker and ends. The next engine of
the rank joins."""

from __future__ import annotations

import pytest

from swell.coordinator.roster import Roster
from tests.simulator.kernel.kernel import WORLD
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import SLOW_STEP_S, Fault, Operation, Request, Scenario

_DRAIN_ENDS_AT_S, _KILLED_AFTER_S = 9.1, 0.05


@pytest.mark.parametrize("expert", [False, True])
@pytest.mark.parametrize(("seed", "grows_at"), [(0, 10.6), (2, 11.2), (16, 11.2), (17, 11.8)])
def test_the_next_engine_of_the_rank_joins(seed: int, grows_at: float, expert: bool) -> None:
    """The seed determines when the earlier engine ends, and when the next one has loaded: before or
    after the successor of the coordinator has a roster."""
    requests = tuple(Request(3.9 + index / 100, 0, (1, 2, index), 400, 0) for index in range(3))
    faults = (Fault("lose-worker", _DRAIN_ENDS_AT_S - 0.2, changing=True),)
    operations = (Operation(4.0, "scale", 2), Operation(grows_at, "scale", 3))
    scenario = Scenario(
        seed, 3, 1, expert, requests, faults, operations, step_s=SLOW_STEP_S, rooms=(3, 0, 0)
    )
    run = Run(scenario)
    plane, gone, listed = run.plane, set[int](), set[int]()

    def on_detach(ranks: list[int]) -> None:
        process, coordinator = plane.coordinators[-1]
        members = coordinator.members
        gone.update(member.incarnation for member in members if member.rank in ranks)
        plane.kernel.at(plane.kernel.now + _KILLED_AFTER_S, WORLD, process.kill)

    def on_roster(_before: Roster, after: Roster, _kept: frozenset[int]) -> None:
        if len(plane.coordinators) == 2:
            listed.update(member.incarnation for member in after.members)

    plane.on_detach.append(on_detach)
    plane.on_roster.append(on_roster)
    assert run.judge().broken == []
    assert len(gone) == 1 and gone <= listed, "the successor has listed the engine"
    assert len(plane.engines) == 4
