"""Shapes of scenarios that can show some planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from tests.simulator.scenario import (
    HOSTS,
    SLOW_STEP_S,
    AtMessage,
    Fault,
    Operation,
    Request,
    Scenario,
    draw_tight,
)


def crowd(scenario: Scenario) -> Scenario:
    """Kills workers in steps of long requests whose outputs are late because packets are lost."""
    requests = [Request(3.1 + 0.05 * index, 0, (index,), 250, index) for index in range(12)]
    losses = [Fault("loss", 3.0, target, 20.0) for target in range(len(HOSTS))]
    hits = [
        Fault(
            "lose-worker", 3.2, scenario.seed, trigger=AtMessage("EngineCoreOutputs", 4 + 6 * index)
        )
        for index in range(6)
    ]
    return replace(
        scenario,
        engines=3,
        ingresses=1,
        expert=False,
        requests=tuple(requests),
        faults=(*losses, *hits),
        operations=(),
        step_s=SLOW_STEP_S,
    )


def silent_coordinator(scenario: Scenario) -> Scenario:
    """Cuts off the coordinator of engines that share experts; Ray does not start another one."""
    faults = Fault("cut", 3.8, 0, 45.0), Fault("gcs-away", 4.3, 0, 45.0)
    return replace(scenario, engines=2, expert=True, faults=faults, operations=())


def upgrading(weights: int) -> Callable[[Scenario], Scenario]:
    """Upgrades the only engine while it streams long answers; processes are killed meanwhile."""

    def shape(scenario: Scenario) -> Scenario:
        requests = [Request(3.1 + 0.05 * index, 0, (index,), 300, index) for index in range(8)]
        kills = [Fault("kill", 5.0 + 2.0 * index, scenario.seed + index) for index in range(2)]
        return replace(
            scenario,
            engines=1,
            ingresses=1,
            expert=False,
            requests=tuple(requests),
            faults=tuple(kills),
            operations=(Operation(3.3, "upgrade", weights),),
            step_s=SLOW_STEP_S,
        )

    return shape


def updating(scenario: Scenario) -> Scenario:
    """Gives the engines other weights while they stream answers, some of them long."""
    requests = [
        Request(3.1 + 0.3 * index, 0, (index,), 300 if index == 1 else 20, index)
        for index in range(24)
    ]
    update = Operation(3.3, "update_weights", 1)
    return replace(
        scenario,
        engines=1 + scenario.seed % 2,
        ingresses=1,
        expert=False,
        requests=tuple(requests),
        faults=(),
        operations=(update,),
        step_s=SLOW_STEP_S,
    )


def kept(scenario: Scenario) -> Scenario:
    """Reduces the number of engines, and restores it while the leaving ones finish requests."""
    requests = [Request(3.5 + 0.05 * index, 0, (index,), 300, index) for index in range(12)]
    return replace(
        scenario,
        engines=3,
        ingresses=1,
        requests=tuple(requests),
        operations=(Operation(4.2, "scale", 1), Operation(5.2, "scale", 3)),
        step_s=SLOW_STEP_S,
        autoscaled=False,
    )


def tight(scenario: Scenario) -> Scenario:
    random = Random(f"planted:{scenario.seed}")
    return draw_tight(random, replace(scenario, expert=False))
