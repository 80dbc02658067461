"""The number of engines follows the load, hosts are added and removed with it, and no answer is
lost."""

from __future__ import annotations

import pytest

from swell.coordinator.manager_state import ScalingCounts
from tests.simulator.kernel.kernel import WORLD
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import (
    HOSTS,
    SLOW_STEP_S,
    AtMessage,
    Fault,
    Operation,
    Request,
    Scenario,
)

_BURST_AT_S = 3.0
_QUIET_AT_S = 40.0
"""A time long after the burst, the reduction to one engine, and the removal of the idle host."""
_WARNED_S = 30.0
"""Seconds of notice before a host is taken: longer than a replacement and a drain take."""


def burst(count: int, tokens: int = 300) -> tuple[Request, ...]:
    """Returns `count` requests that arrive together; one engine has slots for 8 of them."""
    return tuple(Request(_BURST_AT_S, 0, (1, 2, 3, i), tokens, i % 8) for i in range(count))


def watch(run: Run) -> list[ScalingCounts]:
    """Records what the manager wants, twice per second from the burst on."""
    seen: list[ScalingCounts] = []

    def look() -> None:
        manager = run.plane.manager.manager
        seen.append(manager._elasticity.counts(manager.upgrader.status))
        run.plane.kernel.at(run.plane.kernel.now + 0.5, WORLD, look)

    run.plane.kernel.at(_BURST_AT_S, WORLD, look)
    return seen


@pytest.mark.parametrize("expert", [False, True])
def test_a_burst_adds_a_host_and_quiet_removes_it(expert: bool) -> None:
    last = Request(_QUIET_AT_S, 0, (1,), 1, 0)
    requests = (*burst(12, 200), last)
    run = Run(Scenario(0, 1, 1, expert, requests, (), step_s=SLOW_STEP_S, autoscaled=True))
    seen = watch(run)
    assert run.judge().broken == []
    assert max(counts.target for counts in seen) > 1
    assert max(counts.pending for counts in seen) > 0
    assert run.plane.provider is not None and run.plane.provider.added
    assert run.plane.manager.manager.target == 1
    assert sorted(run.plane.provider.given_back) == sorted(run.plane.provider.added)


def test_a_growth_without_room_waits_until_the_target_falls() -> None:
    """Ray's autoscaler cannot add a host."""
    requests = (*burst(2, 4), Request(_QUIET_AT_S, 0, (1,), 1, 0))
    operations = (Operation(3.5, "scale", 4),)
    run = Run(Scenario(0, 1, 1, False, requests, (), operations, autoscaled=True))
    provider = run.plane.provider
    assert provider is not None
    provider.can_add = False
    seen = watch(run)
    assert run.judge().broken == []
    assert provider.added == []
    assert ScalingCounts(4, 3) in seen, "all but one wait"
    assert seen[-1].target == 1 and seen[-1].pending == 0 and not seen[-1].grows


def test_the_target_follows_the_load_although_the_first_manager_saw_no_engine_join() -> None:
    """Manager and coordinator terminate while the first engine joins, so it is in the roster before
    the next manager starts. No host has room for the other three."""
    requests = (Request(_QUIET_AT_S, 0, (1,), 1, 0),)
    faults = (Fault("kill-control", 0.5, trigger=AtMessage("join", 1)),)
    operations = (Operation(8.0, "scale", 4),)
    run = Run(Scenario(0, 1, 1, False, requests, faults, operations, autoscaled=True))
    assert run.plane.provider is not None
    run.plane.provider.can_add = False
    seen = watch(run)
    assert run.judge().broken == [] and len(run.faults.happened) == 2
    assert ScalingCounts(4, 3) in seen, "all but one wait"
    assert seen[-1].target == 1


@pytest.mark.parametrize("expert", [False, True])
def test_engines_leave_a_host_before_it_is_removed(expert: bool) -> None:
    requests = tuple(Request(3.0 + i, 0, (1, 2, 3), 60, i % 8) for i in range(40))
    drained = 0  # index in HOSTS[1:]
    faults = (Fault("drain-host", 6.0, drained, _WARNED_S),)
    run = Run(Scenario(0, 2, 1, expert, requests, faults, step_s=SLOW_STEP_S))
    host = HOSTS[1 + drained]
    there: dict[float, list[str]] = {}

    def look(at: float) -> None:
        there[at] = [e.process.name for e in run.plane.living_engines if e.process.host == host]

    for at in (5.9, 8.0, 6.0 + _WARNED_S - 0.1):
        run.plane.kernel.at(at, WORLD, look, at)
    assert run.judge().broken == []
    assert there[5.9] and not there[6.0 + _WARNED_S - 0.1]
    assert run.faults.happened[-1].split()[1:4] == ["drain-host", host, "is"]
    assert all(each.end == "length" for each in run.plane.requests)
    moves = [len(each.state.ranks) for each in run.plane.requests if each.state]
    assert max(moves) == 1, "each had the time to finish where it was"
