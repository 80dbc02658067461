"""A coordinator is stopped while an operator requests fewer engines and more in turn. Then it
executes all commands of the manager: the engine leaves, is kept, and leaves for another request."""

from __future__ import annotations

import pytest

from tests.simulator.laws.laws import Run
from tests.simulator.scenario import Fault, Operation, Scenario

_STOPPED_AT_S, _STOPPED_S = 3.7, 12.0
_FIRST_AT_S, _LAST_AT_S = 6.8, 12.8


@pytest.mark.parametrize("expert", [False, True])
@pytest.mark.parametrize("targets", [(1, 2, 1), (1, 2, 1, 2, 1)])
def test_commands_that_were_delayed_are_executed_in_order(
    targets: tuple[int, ...], expert: bool
) -> None:
    """An engine that is kept twice in a row has the reason of the last decision, and so leaves for
    another one."""
    stop = Fault("stop-control", _STOPPED_AT_S, 1, _STOPPED_S)
    pause_s = (_LAST_AT_S - _FIRST_AT_S) / (len(targets) - 1)
    operations = tuple(
        Operation(_FIRST_AT_S + pause_s * index, "scale", target)
        for index, target in enumerate(targets)
    )
    run = Run(Scenario(532, 2, 1, expert, (), (stop,), operations, control_host="host1"))
    executed: list[str] = []
    run.plane.on_leave.append(lambda ranks: executed.append(f"leave {ranks}"))
    run.plane.on_keep.append(lambda ranks: executed.append(f"keep {ranks}"))
    assert run.judge().broken == []
    keeps = ["keep [1]"] * targets.count(2)
    assert executed[: len(keeps) + 2] == ["leave [1]", *keeps, "leave [1]"]
    assert len(run.plane.coordinators) == 1
