"""Engines that sleep while something is lost: all of them sleep until they are woken up, no matter
what was lost meanwhile, and every request is answered afterwards."""

from __future__ import annotations

from functools import partial

import pytest

from swell.coordinator.roster import MemberState
from swell.engine.request import MAX_FAILED_ATTEMPTS
from swell.engine.serving.server import EngineServer
from swell.worker.wire import Regrouped
from tests.simulator.control_plane import ControlPlane
from tests.simulator.kernel.kernel import WORLD
from tests.simulator.laws.laws import Run
from tests.simulator.model import POISON_SEED, SimExecutor
from tests.simulator.scenario import Fault, Operation, Request, Scenario

_SLEEP_AT_S, _FAULT_AT_S, _LOOK_AT_S, _WAKE_AT_S = 3.6, 6.0, 40.0, 45.0
FAULTS = {
    "nothing": (),
    "a worker": (Fault("lose-worker", _FAULT_AT_S, target=0),),
    "an engine": (Fault("kill", _FAULT_AT_S, target=0),),
    "coordinator and manager": (Fault("kill-control", _FAULT_AT_S),),
    "coordinator, manager and an engine": (
        Fault("kill-control", _FAULT_AT_S),
        Fault("kill", _FAULT_AT_S, target=1),
    ),
    "a worker while they wake up": (Fault("lose-worker", _WAKE_AT_S + 0.2, target=1),),
    "the control while they wake up": (Fault("kill-control", _WAKE_AT_S + 0.05),),
}


def _run(faults: tuple[Fault, ...], level: int) -> tuple[Run, list[list[int]]]:
    """Returns the run, and a list that gets the engines' sleep levels before they are woken up."""
    requests = tuple(Request(3.5 + i / 10, i % 2, (1, 2, 3 + i), 24, i) for i in range(8))
    operations = (
        Operation(_SLEEP_AT_S, "pause", level),
        Operation(_WAKE_AT_S, "resume"),
    )
    run = Run(Scenario(0, 2, 2, False, requests, faults, operations))
    levels: list[list[int]] = []

    def look(plane: ControlPlane) -> None:
        servers = [engine.server for engine in plane.living_engines]
        levels.append([server.core.memory.sleep_level for server in servers if server is not None])

    run.plane.kernel.at(_LOOK_AT_S, WORLD, partial(look, run.plane))
    return run, levels


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("lost", FAULTS)
def test_engines_sleep_until_they_are_woken_up(lost: str, level: int) -> None:
    run, levels = _run(FAULTS[lost], level)
    assert run.judge().broken == []
    assert levels == [[level, level]]


def test_an_engine_that_steps_while_asleep_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = EngineServer._follow_sleep

    async def wrong(server: EngineServer) -> bool:
        server._is_waking = False
        return await right(server)

    monkeypatch.setattr(EngineServer, "_follow_sleep", wrong)
    run, _ = _run((), 1)
    assert run.judge().broken


class Wakes:
    """Records when engines wake up, and their states in the roster meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at_s: list[float] = []
        self.states: list[MemberState] = []
        self.waking: set[SimExecutor] = set()
        right = SimExecutor._wake

        async def wake(executor: SimExecutor) -> list[Regrouped]:
            self.at_s.append(executor.process.kernel.now)
            self.waking.add(executor)
            try:
                return await right(executor)
            finally:
                self.waking.discard(executor)

        monkeypatch.setattr(SimExecutor, "_wake", wake)

    def look(self, plane: ControlPlane) -> None:
        coordinator = plane.coordinator
        assert coordinator is not None
        roster = coordinator._state_machine.roster
        for engine in plane.living_engines:
            if engine.server is not None and engine.server.core.executor in self.waking:
                member = roster.find(engine.server.rank)
                assert member is not None
                self.states.append(member.state)


def test_requests_use_others_until_an_engine_has_woken_up(monkeypatch: pytest.MonkeyPatch) -> None:
    wakes = Wakes(monkeypatch)
    run, _ = _run((), 2)
    for i in range(40):  # the commands have arrived at the first of these times
        at_s = _WAKE_AT_S + 0.3 + 0.05 * i
        run.plane.kernel.at(at_s, WORLD, partial(wakes.look, run.plane))
    assert run.judge().broken == []
    assert set(wakes.states) == {MemberState.REPAIRING}


def test_a_new_coordinator_wakes_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    wakes = Wakes(monkeypatch)
    run, levels = _run((Fault("kill-control", _FAULT_AT_S),), 2)
    assert run.judge().broken == []
    assert levels == [[2, 2]]
    assert min(wakes.at_s) >= _WAKE_AT_S


def test_a_waking_engine_does_not_start_requests_that_moved_away() -> None:
    """The poison request terminates each engine that computes it. Three engines get it: the second
    one is still reading its weights when the request moves to the third one."""
    poison = Request(3.253367857527694, 0, (48,), 1, POISON_SEED)
    requests = (Request(3.0663622784104434, 0, (9,), 16, 1), poison)
    operations = (
        Operation(3.3678178849080225, "pause", 2),
        Operation(3.4678178849080226, "resume"),
    )
    run = Run(Scenario(73994602882, 2, 1, False, requests, (), operations, step_s=0.03))
    assert run.judge().broken == []
    assert run.faults.num_poisoned == MAX_FAILED_ATTEMPTS
