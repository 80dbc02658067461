"""A newcomer terminates after its manager has begun to let it join, and before it joins."""

from __future__ import annotations

import asyncio

import pytest

from swell.cluster.control.ray.coordinator_handle import CoordinatorHandle
from swell.coordinator.roster import Roster
from swell.coordinator.wire import ClusterView
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import Operation, Request, Scenario

_NOTICED_S = 1.0
"""The manager knows by then that an engine has terminated."""


@pytest.mark.parametrize("expert", [False, True])
def test_the_other_newcomer_does_not_wait_for_one_that_is_dead(
    expert: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = (Operation(3.3, "scale", 3),)
    requests = (Request(12.0, 0, (1, 2), 5, 0),)
    run = Run(Scenario(0, 1, 1, expert, requests, (), operations, rooms=(0, 4, 0)))
    plane, view = run.plane, CoordinatorHandle.view
    killed, killed_rank = list[float](), list[int]()
    joined: list[tuple[float, list[int]]] = []

    async def view_late(coordinator: CoordinatorHandle) -> ClusterView:
        found = await view(coordinator)
        fleet = plane.manager.manager._fleet
        joining = [handle for handle in fleet.starting.values() if handle.in_transition]
        if len(plane.engines) == 3 and joining and not killed:
            [newcomer] = [each for each in plane.engines if each.rank == joining[0].rank]
            newcomer.process.kill()
            killed.append(plane.kernel.now)
            killed_rank.append(newcomer.rank)
            await asyncio.sleep(_NOTICED_S)
        return found

    def on_roster(_before: Roster, after: Roster, _kept: frozenset[int]) -> None:
        joined.append((plane.kernel.now, after.ranks))

    monkeypatch.setattr(CoordinatorHandle, "view", view_late)
    plane.on_roster.append(on_roster)
    assert run.judge().broken == []
    [(at, ranks), *_] = [(at, ranks) for at, ranks in joined if killed and at > killed[0]]
    assert len(ranks) == 2 and killed_rank[0] not in ranks
    assert at - killed[0] < 3.0, "a newcomer that is silent is noticed after ten seconds"
