"""The link between the hosts of two engines that share experts is down for long. The coordinator
and the ingress reach both."""

from __future__ import annotations

import pytest

from tests.simulator.laws.laws import Run
from tests.simulator.scenario import SLOW_STEP_S, Fault, Request, Scenario

_CUT_AT_S, _CUT_S = 4.0, 150.0


@pytest.mark.parametrize("seed", [0, 8])
@pytest.mark.parametrize("kind", [None, "kill-control", "lose-worker"])
def test_the_other_engines_serve_while_a_link_is_down(kind: str | None, seed: int) -> None:
    """The steps of the group do not finish, or do not finish for the pause of a new coordinator, or
    the group without newcomers does not form after an engine has replaced a worker."""
    requests = tuple(Request(3.5 + i / 2, 0, (1, 2, 3), 60, i) for i in range(6))
    later = () if kind is None else (Fault(kind, _CUT_AT_S + 0.5),)
    cut = Fault("cut-pair", _CUT_AT_S, target=1, time_s=_CUT_S)
    scenario = Scenario(
        seed, 3, 1, True, requests, (cut, *later), step_s=SLOW_STEP_S, rooms=(1, 1, 1)
    )
    run = Run(scenario)
    ended_at: list[float] = []
    look = run.watch.look

    def observed_look() -> None:
        look()
        if not ended_at and all(each.end for each in run.plane.requests):
            ended_at.append(run.plane.kernel.now)

    run.watch.look = observed_look  # type: ignore[method-assign]
    assert run.judge().broken == []
    assert ended_at and ended_at[0] < _CUT_AT_S + _CUT_S
