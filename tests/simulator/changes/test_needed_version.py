"""A host is lost while versions change, and the other hosts have room for exactly the target number
of engines. Answers that have begun still finish with their version."""

from __future__ import annotations

import pytest

from tests.simulator.kernel.kernel import WORLD
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import HOSTS, SLOW_STEP_S, Fault, Operation, Request, Scenario

_UPGRADED_AT_S, _CANCELLED_AT_S, _LOST_AT_S = 3.2, 6.0, 6.5
_ANSWERS = 12


@pytest.mark.parametrize("rooms", [(1, 0, 1), (1, 1, 1), (1, 2, 2)])
def test_an_abandoned_version_keeps_room_for_its_answers(rooms: tuple[int, int, int]) -> None:
    """The upgrade is cancelled, its engine is lost, and engines of the old version take all the
    room that is left."""
    requests = [Request(3.0 + i / 4, 0, (1, 2, i), 300, i % 8) for i in range(_ANSWERS)]
    operations = (
        Operation(_UPGRADED_AT_S, "upgrade", 1),
        Operation(_CANCELLED_AT_S, "upgrade", 0),
    )
    run = Run(
        Scenario(
            0,
            rooms[0] + rooms[1],
            1,
            False,
            tuple(requests),
            (Fault("lose-host-for-good", _LOST_AT_S, HOSTS[1:].index(HOSTS[2])),),
            operations,
            step_s=SLOW_STEP_S,
            rooms=rooms,
        )
    )
    lost: list[str] = []

    def look() -> None:
        lost.extend(
            e.current_version for e in run.plane.living_engines if e.process.host == HOSTS[2]
        )

    run.plane.kernel.at(_LOST_AT_S - 0.01, WORLD, look)
    assert run.judge().broken == []
    assert {version[:2] for version in lost} >= {"2-"}
    versions = [each.state.answer_version.version for each in run.plane.requests if each.state]
    assert {str(version)[:2] for version in versions} == {"1-", "2-"}
