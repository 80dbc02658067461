"""An engine joins while the manager compares its engines with an older roster: the engine joins
again, and the manager continues with what it was about to do."""

from __future__ import annotations

from tests.simulator.laws.laws import Run
from tests.simulator.scenario import Operation, Request, Scenario


def test_an_upgrade_continues_after_an_engine_joined_twice() -> None:
    scenario = Scenario(
        seed=73971468,
        engines=3,
        ingresses=2,
        expert=False,
        requests=(Request(at=5.496, ingress=0, prompt=(8,), max_tokens=101, seed=6),),
        faults=(),
        operations=(
            Operation(at=5.101348477941107, kind="redeploy", argument=1),
            Operation(at=5.311687413141775, kind="scale", argument=1),
            Operation(at=5.811687413141775, kind="scale", argument=3),
        ),
        control_host="host1",
        step_s=0.004,
        autoscaled=False,
    )
    assert Run(scenario).judge().broken == []
