"""Engines that share experts lose one of them, with the host of the coordinator and the manager,
and Ray notices it late. The others do not wait for the next coordinator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swell.coordinator.wave_protocol.wave_interface import Phase
from swell.engine.serving.standalone_monitor import StandaloneMonitor
from tests.simulator.control_plane import HEARTBEAT_S, STALL_TIMEOUT_S
from tests.simulator.kernel.process import simulated_exits
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import HOSTS, Fault, Request, Scenario

_LOST_AT_S = 4.0
_LATE_S = 60.0
"""The time after which Ray gives up the host."""
_SOON_S = _LOST_AT_S + 2 * STALL_TIMEOUT_S
"""A time at which an engine steps standalone and has finished its requests."""


def _lose_control_host(engines: int, seed: int) -> Run:
    requests = tuple(
        Request(3.5 + i / 10, i % 2 * 2, (1, 2, 3), 100, i) for i in range(8)
    )  # to the ingresses on the other hosts
    fault = Fault("lose-host-for-good", _LOST_AT_S, target=0)
    scenario = Scenario(seed, engines, 3, True, requests, (fault,), control_host=HOSTS[1])
    run = Run(scenario)
    run.plane.ray.options = replace(run.plane.ray.options, node_timeout_s=_LATE_S)
    return run


@pytest.mark.parametrize("engines", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_remaining_engines_serve_standalone_and_then_share_again(engines: int, seed: int) -> None:
    run = _lose_control_host(engines, seed)
    plane = run.plane
    with simulated_exits():
        plane.kernel.run(_LOST_AT_S - 0.1)
        begun = len(plane.coordinators)
        lost = [e for e in plane.living_engines if e.process.host == HOSTS[1]]
        assert lost, "no engine is on the host of the coordinator"
        plane.kernel.run(_SOON_S)
    left = plane.living_engines
    assert [e.server.core.wave_member.phase for e in left if e.server] == [Phase.STANDALONE] * len(
        left
    )
    assert len(left) == engines - len(lost) and len(plane.coordinators) == begun
    assert [request.end for request in plane.requests] == ["length"] * len(plane.requests)
    assert run.judge().broken == []
    assert len(plane.coordinators) > begun
    assert not any(
        e.server.core.wave_member.phase is Phase.STANDALONE
        for e in plane.living_engines
        if e.server
    )


def test_without_standalone_serving_engines_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandaloneMonitor, "check", lambda *_args, **_more: False)
    run = _lose_control_host(2, 0)
    with simulated_exits():
        run.plane.kernel.run(_SOON_S + 3 * HEARTBEAT_S)
    assert [request.end for request in run.plane.requests].count(None) > 0
    run.plane.close()
