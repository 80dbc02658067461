"""A coordinator is unreachable and is not replaced, while engines and ingresses reach each other:
failures that it would have reported are detected without it."""

from __future__ import annotations

import pytest

from swell.cluster.client.engine_core_client import AsyncEngineCoreClient
from tests.simulator.laws.laws import Run
from tests.simulator.scenario import HOSTS, Fault, Request, Scenario

_HANG_AT_S = 3.5
_CUT_AT_S, _CUT_S = 3.8, 45.0


def _cut(kind: str, host: int) -> tuple[Fault, Fault]:
    """Returns a cut, and a fault that makes Ray's GCS unavailable, so that Ray starts no other
    coordinator."""
    cut = Fault(kind, _CUT_AT_S, target=host, time_s=_CUT_S)
    return cut, Fault("gcs-away", _CUT_AT_S + 0.5, time_s=_CUT_S)


def _run_experts(kind: str) -> Run:
    """Returns a run in which one engine is on the coordinator's host, and one is elsewhere."""
    return Run(Scenario(0, 2, 2, True, (), _cut(kind, 0)))


def _run_hang() -> Run:
    """Returns a run in which an engine hangs just before the cut, and gets requests: no coordinator
    knows for how long it has not computed."""
    faults = Fault("hang", _HANG_AT_S, target=0), *_cut("cut", 2)
    requests = tuple(Request(5.0 + i / 10, 1, (1, 2, 3 + i), 4, i) for i in range(6))
    return Run(Scenario(0, 2, 2, False, requests, faults, control_host=HOSTS[2]))


@pytest.mark.parametrize("kind", ["cut", "half-cut"])
def test_an_ingress_with_an_engine_that_waits_for_the_coordinator_is_not_ready(kind: str) -> None:
    run = _run_experts(kind)
    assert run.judge().broken == []
    assert run.prober.num_compared[False], "it was not ready, and did not answer"


def test_without_a_coordinator_a_request_leaves_a_hanging_engine() -> None:
    assert _run_hang().judge().broken == []


def test_without_replies_of_engines_a_hanging_engine_is_not_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AsyncEngineCoreClient, "_fault", lambda client, engine: None)
    broken = _run_experts("cut").judge().broken
    assert any("is ready, and does not answer" in law for law in broken)
    assert any("is late" in law for law in _run_hang().judge().broken)
