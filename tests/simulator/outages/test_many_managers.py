"""Managers terminate one after the other. Ray does not cancel the calls that they have made: an
engine still executes them for up to 20 s."""

from __future__ import annotations

import pytest

from tests.simulator.kernel.kernel import WORLD
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import Fault, Operation, Scenario

_MANAGER = 1
"""The target of `kill-control` that is only the manager."""
_KILLS = 6


def _kills(first_at_s: float) -> tuple[Fault, ...]:
    """Returns faults that kill a manager every 2.5 s: when it has taken over."""
    return tuple(
        Fault("kill-control", first_at_s + 2.5 * number, _MANAGER) for number in range(_KILLS)
    )


def test_an_engine_that_serves_answers_the_next_manager() -> None:
    run = Run(Scenario(0, 1, 1, False, (), _kills(3.0)))
    started: list[bool] = []
    for seconds in range(3, 3 + 3 * _KILLS):
        run.plane.kernel.at(
            float(seconds), WORLD, lambda: started.append(run.plane.manager.has_started)
        )
    assert run.judge().broken == []
    assert len(run.plane.engines) == 1
    assert started[-1]


@pytest.mark.parametrize("load_s", [10.0, 30.0])
def test_an_engine_that_loads_for_long_is_not_replaced(load_s: float) -> None:
    operations = (Operation(3.5, "scale", 2),)
    run = Run(Scenario(0, 1, 1, False, (), _kills(5.0), operations, slow_load_s=load_s))
    assert run.judge().broken == []
    assert len(run.plane.engines) == 2
