"""A link that is reset repeatedly, faster than an engine computes the first token of a request."""

from __future__ import annotations

import pytest

from tests.simulator.control_plane import ControlPlane
from tests.simulator.kernel.kernel import WORLD
from tests.simulator.kernel.process import simulated_exits
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import Request, Scenario

_BEGIN_S, _SPAN_S, _AFTER_S = 4.0, 30.0, 40.0
_FIRST_TOKEN_S = 2.0


@pytest.mark.parametrize("period_s", [0.5, 1.0])
def test_no_request_fails(period_s: float) -> None:
    requests = tuple(Request(_BEGIN_S + i / 10, 0, (1, 2, 3), 6, i) for i in range(6))
    plane = Run(Scenario(0, 2, 1, False, requests, (), step_s=_FIRST_TOKEN_S)).plane
    for number in range(int(_SPAN_S / period_s)):
        plane.kernel.at(_BEGIN_S + number * period_s, WORLD, _reset, plane)
    with simulated_exits():
        plane.kernel.run(_BEGIN_S + _SPAN_S + _AFTER_S)
    assert [each.end for each in plane.requests] == ["length"] * len(requests)
    [ingress] = plane.ingresses
    assert ingress.llm is not None and not ingress.llm._processor.request_states
    plane.close()


def _reset(plane: ControlPlane) -> None:
    for side in plane.net.connections(""):
        ends = {side.process.name[:3], side.peer.process.name[:3]}
        if ends == {"ing", "sim"}:
            plane.net.drop(side if side.connected_here else side.peer)
