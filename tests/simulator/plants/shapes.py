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


def half_cut_group(scenario: Scenario) -> Scenario:
    """Cuts one direction between two hosts of engines that share experts, for longer than the time
    after which the coordinator acts."""
    cut = Fault("half-cut-pair", 3.73, 3, 14.5, changing=True)
    return replace(
        scenario,
        engines=3,
        ingresses=3,
        expert=True,
        requests=(),
        faults=(cut,),
        operations=(),
        control_host=HOSTS[2],
        autoscaled=False,
        rooms=(0, 1, 2),
        prefill_engines=0,
    )


def kept_by_a_successor(scenario: Scenario) -> Scenario:
    """Kills the manager while a group does not form without two engines, and its successor when
    more engines are requested again."""
    formed = AtMessage("ReconfigureDistributedRequest", 1)
    kill = Fault("kill-control", 3.751, 1, trigger=formed)
    black_hole = Fault("black-hole", 4.893, 1, 3.92, trigger=AtMessage("EngineReport", 1))
    again = Fault("kill-control", 6.087, 1, same=True)
    requested = Operation(3.761, "scale", 3, formed)
    scales = [Operation(at, "scale", n) for at, n in ((3.751, 2), (3.938, 1), (6.502, 4))]
    return replace(
        scenario,
        engines=3,
        ingresses=3,
        expert=True,
        requests=(Request(3.865, 1, (40, 9, 5, 47, 3, 11), 275, 6),),
        faults=(kill, black_hole, again),
        operations=(scales[0], requested, *scales[1:]),
        control_host=HOSTS[0],
        autoscaled=False,
        rooms=(2, 2, 2),
        prefill_engines=0,
        no_engine_timeout_s=3.0,
    )


def slow_removal(scenario: Scenario) -> Scenario:
    """Changes the number of engines often, and kills two of them, while calls through Ray are slow
    and two managers run."""
    second = Fault("second-manager", 3.992360425763879, 10, 8.131886120358919)
    slow = Fault("slow-calls", 5.505446490566227, 10, 8.981065431413302)
    kills = [
        Fault("kill", 8.524965962445899, 10, changing=True),
        Fault("kill", 9.491147405079646, 10, same=True),
    ]
    scales = (
        (3.739219236327589, 2),
        (3.7900685425792204, 3),
        (5.850337388172579, 1),
        (5.904016946476725, 4),
        (7.327113717825578, 2),
        (9.851343900204554, 4),
    )
    return replace(
        scenario,
        engines=1,
        ingresses=3,
        expert=True,
        requests=(),
        faults=(second, slow, *kills),
        operations=tuple(Operation(at, "scale", number) for at, number in scales),
        control_host=HOSTS[2],
        step_s=SLOW_STEP_S,
        autoscaled=False,
        rooms=(0, 3, 3),
        prefill_engines=0,
    )
