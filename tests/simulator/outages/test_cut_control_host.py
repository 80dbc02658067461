"""The host of the coordinator and the manager is cut off; one engine runs there and one
elsewhere."""

from __future__ import annotations

import pytest

from tests.simulator.kernel.kernel import WORLD
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import HOSTS, AtMessage, Fault, Operation, Request, Scenario

_CUT_AT_S = 4.0


@pytest.mark.parametrize("expert", [False, True])
@pytest.mark.parametrize("cut_s", [2.0, 6.0, 11.0, 20.0, 40.0])
def test_an_isolated_manager_kills_no_engine_elsewhere(expert: bool, cut_s: float) -> None:
    """Ray gives up a node after ten seconds, and starts the coordinator elsewhere. The engines that
    reach it continue to serve with it and a new manager."""
    requests = tuple(Request(3.5 + i / 10, 0, (1, 2, 3), 200, i) for i in range(4))
    cut = Fault("cut", _CUT_AT_S, target=1, time_s=cut_s)
    run = Run(Scenario(0, 2, 1, expert, requests, (cut,), control_host=HOSTS[1]))
    first: list[str] = []

    def look() -> None:
        first.extend(e.process.name for e in run.plane.engines if e.process.host == HOSTS[0])

    run.plane.kernel.at(_CUT_AT_S - 0.1, WORLD, look)
    ended: list[str] = []
    run.plane.ray.on_end.append(lambda process: ended.append(process.name))
    assert run.judge().broken == []
    assert len(run.plane.coordinators) <= 2, "its successor was ended, too"
    assert first and not set(first) & set(ended)


def test_an_engine_that_has_left_its_group_is_not_used() -> None:
    """The manager stops before it terminates the engine. An ingress that does not hear the
    coordinator reaches the engine, and does not know that it has left."""
    cut = Fault("half-cut-pair", _CUT_AT_S, target=5, time_s=20.0)
    stop = Fault("stop-control", _CUT_AT_S, target=5, time_s=20.0, trigger=AtMessage("detach", 1))
    scale = Operation(_CUT_AT_S + 1.0, "scale", 1)
    run = Run(
        Scenario(
            0,
            engines=2,
            ingresses=2,
            expert=True,
            requests=(),
            faults=(cut, stop),
            operations=(scale,),
            control_host=HOSTS[2],
            rooms=(3, 0, 0),
        )
    )
    assert run.judge().broken == []
    assert run.prober.num_compared[True] > 1, "the other engine answers"
