"""A call through Ray fails, because a connection broke for a moment. The call may have been
executed."""

from __future__ import annotations

import pytest

from tests.simulator.laws.laws import Run
from tests.simulator.scenario import SLOW_STEP_S, AtMessage, Fault, Operation, Request, Scenario

CALLS = ("ended", "start", "leave", "cancel_leave", "detach", "join", "remove_failed", "wait")
_WAYS = range(3)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("way", _WAYS)
def test_a_failed_call_of_a_change_is_made_good(call: str, way: int) -> None:
    """The number of engines is reduced, restored and increased while they stream answers, and an
    engine dies."""
    failing = Fault("fail-call", 3.6, way, trigger=AtMessage(call, 1))
    scenario = Scenario(
        seed=way,
        engines=3,
        ingresses=1,
        expert=False,
        requests=tuple(Request(3.5 + 0.1 * i, 0, (i,), 100, i) for i in range(9)),
        faults=(failing, Fault("kill", 12.0, 2)),
        operations=(
            Operation(4.0, "scale", 1),
            Operation(4.5, "scale", 2),
            Operation(14.0, "scale", 4),
        ),
        step_s=SLOW_STEP_S,
    )
    run = Run(scenario)
    assert run.judge().broken == []
    assert any(f".{call} " in line for line in run.faults.happened)


def test_the_status_is_read_again_after_a_call_of_it_has_failed() -> None:
    failing = Fault("fail-call", 6.0, 0, trigger=AtMessage("view", 1))
    run = Run(Scenario(0, 1, 1, False, (), (failing,)))
    assert run.judge().broken == []
    assert [line.split()[1] for line in run.faults.happened] == ["fail-call"]
