"""Two engines are added to a group that shares experts, and one of them hangs while the group
forms."""

from __future__ import annotations

import pytest

from tests.simulator.kernel.kernel import WORLD
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import Operation, Request, Scenario

_SCALE_AT_S = 3.5
_POLL_S = 0.02
_LOADED_S = 3.0
"""The time after the request within which the newcomers run."""


@pytest.mark.parametrize("hanging", [1, 2])
def test_the_other_newcomer_serves(hanging: int) -> None:
    requests = tuple(Request(3.4 + i / 2, 0, (1, 2, 3), 200, i) for i in range(6))
    run = Run(Scenario(0, 1, 1, True, requests, (), (Operation(_SCALE_AT_S, "scale", 3),)))
    plane = run.plane
    hung: list[str] = []

    def hang() -> None:
        for engine in plane.engines:
            if engine.rank == hanging and not hung:
                engine.executor.hangs = True
                hung.append(engine.process.name)

    for poll in range(int(_LOADED_S / _POLL_S)):
        plane.kernel.at(_SCALE_AT_S + poll * _POLL_S, WORLD, hang)
    ended: list[str] = []
    plane.ray.on_end.append(lambda process: ended.append(process.name))
    run.faults.num_hangs += 1  # the requests that it holds up have as much time as a hang may take
    run.faults.kinds.add("hang")
    assert run.judge().broken == []
    assert hung and set(ended) == set(hung)
    assert plane.manager.manager.target == 2
