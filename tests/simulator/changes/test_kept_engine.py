"""A coordinator is stopped while an operator requests fewer engines, more, and fewer again. Then it
executes all commands of the manager: the engine leaves, is kept, and leaves for another request."""

from __future__ import annotations

import pytest

from tests.simulator.laws.laws import Run
from tests.simulator.scenario import Fault, Operation, Scenario

_STOPPED_AT_S, _STOPPED_S = 3.7, 12.0


@pytest.mark.parametrize("expert", [False, True])
def test_commands_that_were_delayed_are_executed_in_order(expert: bool) -> None:
    stop = Fault("stop-control", _STOPPED_AT_S, 1, _STOPPED_S)
    targets = enumerate((1, 2, 1))
    operations = tuple(Operation(6.8 + 3.0 * each, "scale", target) for each, target in targets)
    run = Run(Scenario(532, 2, 1, expert, (), (stop,), operations, control_host="host1"))
    executed: list[str] = []
    run.plane.on_leave.append(lambda ranks: executed.append(f"leave {ranks}"))
    run.plane.on_keep.append(lambda ranks: executed.append(f"keep {ranks}"))
    assert run.judge().broken == []
    assert executed[:3] == ["leave [1]", "keep [1]", "leave [1]"]
    assert len(run.plane.coordinators) == 1
