"""A group hangs while it should grow, and its coordinator is lost twice. The newcomers have
requests and cannot compute before the group has paused, but they are not the cause and must not be
killed."""

from __future__ import annotations

from tests.simulator.kernel.kernel import WORLD
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import Fault, Operation, Request, Scenario

_HANG_AT_S, _SCALE_AT_S = 3.5, 3.6
_KILLS_AT_S = (5.5, 8.5)
_SENT_AT_S = 8.0
"""A time between the kills, when the first new coordinator has found the newcomers, and ingresses
send them requests."""


def test_only_the_engine_that_hangs_is_ended() -> None:
    early = Request(_HANG_AT_S - 0.3, 0, (1, 2, 3), 4, 0)
    requests = (early, *(Request(_SENT_AT_S + i / 10, 0, (1, 2, 3), 4, i) for i in range(4)))
    kills = tuple(Fault("kill-control", at_s) for at_s in _KILLS_AT_S)
    grow = Operation(_SCALE_AT_S, "scale", 3)
    run = Run(Scenario(0, 1, 1, True, requests, kills, (grow,)))
    plane = run.plane
    hung: list[str] = []

    def hang() -> None:
        [engine] = plane.engines
        engine.executor.hangs = True
        hung.append(engine.process.name)

    plane.kernel.at(_HANG_AT_S, WORLD, hang)
    run.faults.num_hangs += 1  # the requests that it holds up have as much time as a hang may take
    run.faults.kinds.add("hang")
    ended: list[str] = []
    plane.ray.on_end.append(lambda process: ended.append(process.name))
    assert run.judge().broken == []
    assert hung and set(ended) == set(hung)
    assert plane.manager.manager.target == 3
