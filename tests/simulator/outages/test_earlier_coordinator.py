"""The head of Ray does not reach the coordinator's host, and starts another coordinator. An engine
that reaches the earlier one follows it until it is silent."""

from __future__ import annotations

import pytest

from swell.coordinator.wave_protocol.wave_interface import Phase
from tests.simulator.kernel.kernel import WORLD
from tests.simulator.laws.laws import Run
from tests.simulator.laws.observations.watch import Watch
from tests.simulator.scenario import (
    HOSTS,
    SLOW_STEP_S,
    Fault,
    Operation,
    Request,
    Scenario,
)

_PAUSE_AT_S, _CUT_AT_S, _CUT_S = 3.2, 4.0, 25.0
_REPLACED_AT_S, _RESUME_AT_S = _CUT_AT_S + 12.0, _CUT_AT_S + 14.0
"""When another manager starts, on a host that Ray has not given up, and when it gets a request."""
_LOOK_AT_S = _CUT_AT_S + _CUT_S - 1.0
_CUT = Fault("cut-pair", _CUT_AT_S, target=2, time_s=_CUT_S)
"""A cut between the first and the last host."""


def test_an_engine_leaves_although_it_follows_an_earlier_coordinator() -> None:
    """The newest coordinator does not know that the engine is idle, so it leaves at the end of its
    drain time."""
    drain = Operation(_CUT_AT_S + _CUT_S + 1.0, "drain", 1)
    run = Run(Scenario(0, 2, 1, False, (), (_CUT,), (drain,), control_host=HOSTS[2]))
    plane, followed = run.plane, list[bool]()

    def on_leave(ranks: list[int]) -> None:
        for engine in plane.living_engines:
            if engine.rank in ranks and engine.server is not None and plane.coordinator is not None:
                address = engine.server._coordinator_client._address
                followed.append(address != plane.coordinator.address)

    plane.on_leave.append(on_leave)
    assert run.judge().broken == []
    assert len(plane.coordinators) == 2 and followed[0]


def _run_newcomer() -> Run:
    """Returns a run in which an engine serves shortly before the newest manager finds it, with the
    address of a coordinator that was lost while the engine loaded. It must leave at once."""
    faults = (Fault("kill", 6.32, target=6), Fault("lose-host-for-good", 8.5))
    return Run(
        Scenario(
            7000514,
            engines=2,
            ingresses=1,
            expert=False,
            requests=(Request(4.63, 0, (0,), 141, 5),),
            faults=faults,
            operations=(Operation(5.44, "update_weights", 1),),
            control_host=HOSTS[1],
            step_s=SLOW_STEP_S,
            rooms=(2, 2, 0),
            prefill_engines=1,
            slow_load_s=14.6,
        )
    )


def test_an_engine_that_has_just_begun_to_serve_has_time_to_find_the_coordinator() -> None:
    assert _run_newcomer().judge().broken == []


def test_an_engine_that_could_know_of_the_coordinator_must_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Watch, "may_be_unheard", lambda watch, engine: False)
    [broken] = _run_newcomer().judge().broken
    assert broken.endswith("has no requests, and does not leave")


def _run_resumed() -> Run:
    """Returns a run in which a pause ends at the newest coordinator only. It leads one engine, and
    is to let the other two join, which follow the earlier one. Both ingresses have a request."""
    operations = (Operation(_PAUSE_AT_S, "pause"), Operation(_RESUME_AT_S, "resume"))
    requests = (
        Request(_CUT_AT_S + 1.0, 1, (1, 2, 3), 1, 0),
        Request(_RESUME_AT_S + 1.0, 0, (1, 2, 3), 1, 0),
    )
    return Run(
        Scenario(
            0,
            engines=3,
            ingresses=2,
            expert=True,
            requests=requests,
            faults=(_CUT, Fault("kill-control", _REPLACED_AT_S, target=1)),
            operations=operations,
            control_host=HOSTS[2],
            rooms=(1, 2, 0),
        )
    )


def test_engines_resume_once_the_coordinator_that_has_paused_them_is_silent() -> None:
    run = _run_resumed()
    plane, phases, ends = run.plane, list[Phase](), list[str | None]()

    def look() -> None:
        servers = [each.server for each in plane.living_engines if each.process.host == HOSTS[1]]
        phases.extend(each.core.wave_member.phase for each in servers if each is not None)
        ends.extend(request.end for request in plane.requests)

    plane.kernel.at(_LOOK_AT_S, WORLD, look)
    assert run.judge().broken == []
    assert len(plane.coordinators) == 2 and not plane.operator.paused
    assert set(phases) == {Phase.PAUSED}
    assert ends == [None, "length"], "the engine that the newest coordinator leads serves"


def test_engines_that_could_know_of_a_resume_must_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "may_be_unheard", lambda watch, engine: False)
    assert _run_resumed().judge().broken == ["r0 is late"]
