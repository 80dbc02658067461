"""Engines get other weights in place: no process terminates, and no answer mixes versions."""

from __future__ import annotations

import pytest

from swell.coordinator.roster import Roster
from tests.simulator.kernel.kernel import WORLD
from tests.simulator.laws.laws import Run
from tests.simulator.model import BROKEN_WEIGHTS
from tests.simulator.scenario import SLOW_STEP_S, Fault, Operation, Request, Scenario

_UPDATED_AT_S = 3.5


def _run(engines: int, *weights: int, faults: tuple[Fault, ...] = ()) -> Run:
    """Returns a run in which long answers stream while the weights change every second."""
    requests = [Request(3.0 + i / 4, 0, (1, 2, i), 20 + 10 * (i % 9), i % 8) for i in range(20)]
    operations = [
        Operation(_UPDATED_AT_S + i, "update_weights", number) for i, number in enumerate(weights)
    ]
    return Run(
        Scenario(
            0,
            engines,
            1,
            False,
            tuple(requests),
            faults,
            tuple(operations),
            step_s=SLOW_STEP_S,
            rooms=(engines, 0, 0),
        )
    )


def _answered_by(run: Run) -> list[str]:
    found = {each.state.answer_version.version for each in run.plane.requests if each.state}
    return sorted(str(version)[:2] for version in found)


@pytest.mark.parametrize("engines", [1, 2, 3])
@pytest.mark.parametrize(
    ("weights", "versions"),
    [((1,), ["1-", "2-"]), ((BROKEN_WEIGHTS,), ["1-"]), ((1, 2, 5), ["1-"]), ((1, 0), ["1-"])],
)
def test_no_process_exits_during_an_update(
    engines: int, weights: tuple[int, ...], versions: list[str]
) -> None:
    """No other process starts either, because there is no room for it."""
    run = _run(engines, *weights)
    assert run.judge().broken == []
    assert len(run.plane.engines) == engines
    assert {*versions} <= {*_answered_by(run)}
    name = run.plane.manager.manager.upgrader.record.wanted
    assert {engine.current_version for engine in run.plane.engines} == {name}
    wanted = next((w for w in reversed(weights) if w != BROKEN_WEIGHTS), 0)
    assert name.endswith(f"{wanted:012x}")


def test_the_next_coordinator_keeps_an_engine_that_has_loaded_meanwhile() -> None:
    """The coordinator terminates when the engine has left to load other weights. The next one lists
    the engine with its new incarnation before the manager lets it join."""
    run = _run(2, 1)
    plane = run.plane
    lost: list[int] = []

    def on_detach(ranks: list[int]) -> None:
        if len(plane.coordinators) == 1:
            plane.kernel.at(plane.kernel.now + 0.05, WORLD, plane.coordinators[0][0].kill)

    def on_roster(before: Roster, after: Roster, _kept: frozenset[int]) -> None:
        gone = {m.incarnation for m in before.members} - {m.incarnation for m in after.members}
        lost.extend(gone.difference(after.left))

    plane.on_detach.append(on_detach)
    plane.on_roster.append(on_roster)
    assert run.judge().broken == [] and len(plane.coordinators) == 2
    assert lost == [], "both engines only left"


@pytest.mark.parametrize("kind", ["kill", "kill-control", "lose-worker", "cut", "gcs-away", "hang"])
@pytest.mark.parametrize("later_s", [0.2, 0.7, 1.5, 4.0])
@pytest.mark.parametrize("target", [0, 1])
def test_an_update_survives_faults_at_every_moment(kind: str, later_s: float, target: int) -> None:
    fault = Fault(kind, _UPDATED_AT_S + later_s, target, time_s=5.0)
    assert _run(2, 1, faults=(fault,)).judge().broken == []


@pytest.mark.parametrize("stopped_s", [0.0, 2.0, 8.0])
def test_a_coordinator_restarts_before_an_engine_has_reloaded(
    stopped_s: float,
) -> None:
    """The new coordinator hears the engine under its earlier incarnation, and adds it to the
    roster. No process is terminated for that."""
    run, left = _run(2, 1), []
    plane, kernel = run.plane, run.plane.kernel

    def on_detach(ranks: list[int]) -> None:
        left.append(ranks)
        if len(left) > 1:
            return
        manager = plane.manager.process
        if stopped_s:
            kernel.at(kernel.now + 0.002, WORLD, manager.stop)
            kernel.at(kernel.now + 0.002 + stopped_s, WORLD, manager.resume)
        kernel.at(kernel.now + 0.004, WORLD, plane.coordinators[-1][0].kill)

    plane.on_detach.append(on_detach)
    assert run.judge().broken == []
    assert len(plane.engines) == 2 and len(left) == 2


@pytest.mark.parametrize("seed", [*range(6), 73994702929])
def test_an_upgrade_begins_while_an_engine_waits_to_rejoin(
    seed: int,
) -> None:
    """The engine has weights of a version that is not wanted any more, and still joins."""
    operations = (
        Operation(4.203307185516428, "update_weights", 1),
        Operation(6.203307185516428, "upgrade", 2),
    )
    faults = (
        Fault("lose-host-for-good", 5.190435760614167, 0),
        Fault("kill", 4.897584080237601, 11),
    )
    run = Run(
        Scenario(seed, 3, 1, False, (), faults, operations, step_s=SLOW_STEP_S, rooms=(2, 1, 1))
    )
    assert run.judge().broken == []
