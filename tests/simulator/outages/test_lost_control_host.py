"""The host of the coordinator and the manager is lost for good while requests stream: both restart
on another host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from swell.coordinator.transport.finder import CoordinatorFinder
from tests.simulator.control_plane import ControlPlane
from tests.simulator.kernel.kernel import WORLD
from tests.simulator.kernel.process import simulated_exits
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import HOSTS, AtMessage, Fault, Operation, Request, Scenario

_LOST_AT_S = 4.0
_UPDATED_AT_S, _UPDATE_S = 30.0, 10.0
"""When other weights are requested, and within which time all engines have loaded them."""
_LOOK_S = 0.1


def _run(
    change: Callable[[ControlPlane], None] = lambda plane: None,
    seed: int = 0,
    operations: tuple[Operation, ...] = (),
) -> Run:
    """`change` happens half a second before the host is lost."""
    requests = tuple(Request(3.5 + i / 10, i % 2, (1, 2, 3), 24, i) for i in range(8))
    faults = (Fault("lose-host-for-good", _LOST_AT_S, target=0),)
    run = Run(Scenario(seed, 2, 2, False, requests, faults, operations, control_host=HOSTS[1]))
    run.plane.kernel.at(_LOST_AT_S - 0.5, WORLD, partial(change, run.plane))
    return run


@pytest.mark.parametrize("seed", range(5))
def test_coordinator_and_manager_restart_on_another_host(seed: int) -> None:
    run = _run(seed=seed)
    assert run.judge().broken == []
    hosts = [process.host for process, _ in run.plane.coordinators]
    assert hosts[0] == HOSTS[1] and hosts[-1] != HOSTS[1]
    assert run.plane.manager.process.host != HOSTS[1]


def test_the_manager_continues_although_its_new_coordinator_dies() -> None:
    """The next coordinator learns about the previous manager from the engines."""
    lost, at_view = Fault("lose-host-for-good", 6.1, target=1), partial(AtMessage, "ClusterView")
    first = Fault("kill", 7.6, target=0, trigger=at_view(3))
    second = Fault("kill", 3.7, target=8, trigger=at_view(5))
    run = Run(
        Scenario(
            73994704492,
            *(2, 2, False),
            requests=(Request(3.6, 0, (8,), 123, 4),),
            faults=(lost, first, second),
            operations=(Operation(3.4, "upgrade", 1),),
            control_host=HOSTS[2],
            rooms=(2, 0, 1),
        )
    )
    verdict = run.judge()
    assert len(verdict.faults) == 3 and verdict.broken == []


def test_an_engine_that_loads_other_weights_follows_the_new_coordinator_at_once() -> None:
    """The engine was created with the address of the first coordinator."""
    run = _run(operations=(Operation(_UPDATED_AT_S, "update_weights", 1),))
    followed: dict[int, bool] = {}

    def look() -> None:
        for engine in run.plane.living_engines:
            if engine.server is not None:
                address = engine.server._coordinator_client._address
                is_new = address == run.plane.coordinators[-1][1].address
                followed.setdefault(engine.server.incarnation, is_new)

    for turn in range(int(_UPDATE_S / _LOOK_S)):
        run.plane.kernel.at(_UPDATED_AT_S + turn * _LOOK_S, WORLD, look)
    assert run.judge().broken == []
    assert len(followed) == 4 and all(followed.values())


def test_without_a_search_the_new_coordinator_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoordinatorFinder, "check", lambda finder: None)
    assert _run().judge().broken


def test_a_pause_survives_both_although_its_checkpoint_is_lost() -> None:
    """The engines have kept the pause and the target."""

    def pause(plane: ControlPlane) -> None:
        plane.manager.do("pause", (), lambda _target: None, lambda _result: None)

    def lose_checkpoint(plane: ControlPlane) -> None:
        for key in [key for key in plane.ray.values if b":note-" in key]:
            del plane.ray.values[key]

    run = _run(pause)
    plane = run.plane
    plane.kernel.at(_LOST_AT_S + 0.1, WORLD, lose_checkpoint, plane)
    with simulated_exits():
        plane.kernel.run(60.0)
    manager = plane.manager.manager
    assert plane.manager.has_started and plane.manager.process.host != HOSTS[1]
    assert manager.pause_requested and manager.target == 2
    plane.close()
