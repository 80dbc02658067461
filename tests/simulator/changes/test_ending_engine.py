"""A manager terminates before it has terminated the process of an engine: one that left and that it
has stopped, or one that hangs and that the coordinator has removed."""

from __future__ import annotations

import asyncio

import pytest

from swell.coordinator.manager_state import ManagerId
from swell.coordinator.roster import Roster
from tests.simulator.actors import SimEngine
from tests.simulator.kernel.kernel import WORLD
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import SLOW_STEP_S, AtMessage, Fault, Operation, Request, Scenario

_GROWS_AT_S = 4.7
"""Another engine is wanted when the drain is over."""
_SLOW_S = 2.0
"""How long the answer to the stop takes. The manager terminates before it arrives."""


def test_the_next_manager_does_not_adopt_a_stopped_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = tuple(Request(3.5 + i / 4, 0, (1, 2, 3), 24, i) for i in range(12))
    operations = (Operation(4.0, "drain", 1), Operation(_GROWS_AT_S, "scale", 2))
    run = Run(Scenario(0, 2, 1, False, requests, (), operations, rooms=(0, 2, 0)))
    plane, stop = run.plane, SimEngine.stop
    stopped: list[int] = []
    back: list[int] = []

    async def stop_and_lose_manager(engine: SimEngine, by: ManagerId) -> None:
        await stop(engine, by)
        await asyncio.sleep(_SLOW_S)
        if not stopped and engine.server is not None:
            stopped.append(engine.server.incarnation)
            plane.manager.process.kill()

    def on_roster(_before: Roster, after: Roster, _kept: frozenset[int]) -> None:
        back.extend(m.rank for m in after.members if m.incarnation in stopped)

    monkeypatch.setattr(SimEngine, "stop", stop_and_lose_manager)
    plane.on_roster.append(on_roster)
    assert run.judge().broken == []
    assert stopped and not back


def test_the_next_manager_does_not_adopt_an_engine_that_was_stopped_while_it_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another manager takes over before this one kills the process."""
    operations = Operation(3.3, "scale", 2), Operation(4.3, "scale", 1), Operation(4.4, "scale", 2)
    run = Run(Scenario(0, 1, 1, False, (), (), operations, slow_load_s=0.6))
    plane, stop, stopped = run.plane, SimEngine.stop, list[SimEngine]()

    async def stop_late(engine: SimEngine, by: ManagerId) -> None:
        await stop(engine, by)
        if not stopped and engine.server is None:
            stopped.append(engine)
            await asyncio.sleep(0.25 * _SLOW_S)
            plane.replace_manager()
            await asyncio.sleep(_SLOW_S)

    monkeypatch.setattr(SimEngine, "stop", stop_late)
    assert run.judge().broken == []
    [engine] = stopped
    assert engine.server is None, "it has never served"


def test_the_next_coordinator_may_list_a_stopping_engine() -> None:
    """The manager cancels the start of the engine, and is lost with the coordinator before it kills
    the process. The engine introduces itself to the next coordinator, and then stops."""
    faults = (
        Fault("slow-calls", 8.327734876930919, 4, 10.771840376908202),
        Fault("kill-control", 11.34, 10, trigger=AtMessage("kv_put", 1)),
    )
    scales = (3.8017298784881817, 2), (5.14, 4), (9.087601769159534, 4), (12.537276745829462, 2)
    scenario = Scenario(
        seed=2699,
        engines=3,
        ingresses=3,
        expert=True,
        requests=(),
        faults=faults,
        operations=tuple(Operation(at, "scale", number) for at, number in scales),
        control_host="host1",
        step_s=SLOW_STEP_S,
        rooms=(0, 3, 3),
        prefill_engines=1,
        slow_load_s=6.0,
    )
    assert Run(scenario).judge().broken == []


@pytest.mark.parametrize("expert", [False, True])
@pytest.mark.parametrize("kind", ["left", "cancelled"])
def test_the_next_coordinator_does_not_keep_an_engine_that_waits_for_its_end(
    expert: bool, kind: str
) -> None:
    """Ray's GCS is away, so the manager cannot end an engine that has left, or whose start it has
    cancelled. The next coordinator treats it as a member, because it reports."""
    left = (Operation(4.95, "scale", 1),)
    cancelled = Operation(3.5, "scale", 3), Operation(5.5, "scale", 2)
    faults = (Fault("gcs-away", 5.0, time_s=18.0),)
    operations = left if kind == "left" else cancelled
    scenario = Scenario(0, 2, 2, expert, (), faults, operations, slow_load_s=3.0, rooms=(1, 1, 1))
    run = Run(scenario)
    run.plane.kernel.at(9.0, WORLD, lambda: run.plane.coordinators[-1][0].kill())
    listed: list[list[int]] = []
    run.plane.on_roster.append(lambda before, after, kept: listed.append(after.ranks))
    assert run.judge().broken == []
    target = 1 if kind == "left" else 2
    assert len(run.plane.coordinators) == 2
    assert listed[-2:] == [[*range(target + 1)], [*range(target)]]


def test_an_engine_with_a_cancelled_start_leaves_a_group_that_hangs() -> None:
    """Ray's GCS is away when the start is cancelled, so the engine loads and never joins. The next
    coordinator lists it, and its group can change only after an engine that hangs is removed."""
    faults = (
        Fault("hang", 3.3, 9),
        Fault("gcs-away", 11.2, time_s=15.4),
        Fault("kill-control", 27.0, 11),
    )
    operations = Operation(8.6, "scale", 4), Operation(11.4, "scale", 1)
    scenario = Scenario(
        seed=0,
        engines=3,
        ingresses=1,
        expert=True,
        requests=(),
        faults=faults,
        operations=operations,
        control_host="host1",
        rooms=(2, 2, 2),
        slow_load_s=2.0,
    )
    run = Run(scenario)
    listed: list[list[int]] = []
    run.plane.on_roster.append(lambda before, after, kept: listed.append(after.ranks))
    assert run.judge().broken == []
    assert [0, 1, 2, 3] in listed and listed[-1] == [0]


@pytest.mark.parametrize("expert", [False, True])
def test_the_next_manager_ends_an_engine_that_hangs(expert: bool) -> None:
    requests = tuple(Request(3.5 + i / 4, 0, (1, 2, 3), 24, i) for i in range(12))
    faults = (Fault("hang", 4.0),)
    run = Run(Scenario(0, 2, 1, expert, requests, faults, step_s=SLOW_STEP_S, rooms=(0, 3, 0)))
    plane, back, hanging = run.plane, list[int](), set[int]()
    first = plane.manager

    def on_roster(_before: Roster, after: Roster, _kept: frozenset[int]) -> None:
        hanging.update(
            each.server.incarnation
            for each in plane.living_engines
            if each.executor.hangs and each.server is not None
        )
        members = {member.incarnation for member in after.members}
        if plane.manager is not first:
            back.extend(hanging & members)
        elif hanging - members:
            plane.manager.process.kill()

    plane.on_roster.append(on_roster)
    assert run.judge().broken == []
    assert plane.manager is not first and hanging and not back
