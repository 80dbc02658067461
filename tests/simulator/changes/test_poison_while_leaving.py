"""A poison request terminates each engine that computes it, and the first one is told to leave
before its termination is known. The request is still given up after two engines."""

from __future__ import annotations

import pytest

from swell.engine.request import MAX_FAILED_ATTEMPTS
from tests.simulator.kernel.kernel import WORLD
from tests.simulator.laws.laws import Run
from tests.simulator.model import POISON_SEED
from tests.simulator.scenario import Operation, Request, Scenario

_ENGINES = 3
_SENT_AT_S = 4.3
_KNOWN_S = 0.1
"""The time from the termination of an engine until Ray tells the manager."""


def _first_engine(expert: bool) -> int:
    """Returns the rank of the first engine that gets the request."""
    run = Run(_scenario(expert))
    assert run.judge().broken == []
    state = run.plane.requests[0].state
    assert state is not None
    return state.ranks[0]


def _scenario(expert: bool, *operations: Operation) -> Scenario:
    request = Request(_SENT_AT_S, 0, (27,), 1, POISON_SEED)
    return Scenario(0, _ENGINES, 1, expert, (request,), (), operations)


@pytest.mark.parametrize("expert", [False, True])
def test_a_poisonous_request_does_not_crash_a_third_engine(expert: bool) -> None:
    drain = Operation(_SENT_AT_S + 0.9 * _KNOWN_S, "drain", _first_engine(expert))
    run = Run(_scenario(expert, drain))
    left: list[int] = []

    def look() -> None:
        roster = run.plane.coordinators[-1][1]._state_machine.roster
        left.extend(member.rank for member in roster.members if member.state == "leaving")

    run.plane.kernel.at(_SENT_AT_S + _KNOWN_S, WORLD, look)
    assert run.judge().broken == []
    assert left == [drain.argument]
    assert run.faults.num_poisoned == MAX_FAILED_ATTEMPTS
