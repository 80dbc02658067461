"""Tests the scale simulation with a small cluster: it measures all costs, and loses no request."""

from __future__ import annotations

import time

import pytest

from tests.simulator.kernel.kernel import Kernel
from tests.simulator.kernel.process import simulated_exits
from tests.simulator.scale.__main__ import Limits, ScaleRun
from tests.simulator.scale.channel_costs import ChannelCosts, Cost
from tests.simulator.scale.meter import MeteredProcess, metered_messages

COSTS = ChannelCosts(Cost(1e-6, 2e-6, 3e-5), Cost(1e-6, 2e-6, 3e-5), 1e-6, 1e-5, 0.0, 1e-9)


def test_a_small_cluster_serves_all_requests_and_loses_an_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.simulator.scale.__main__.MEASURED_S", 2.0)
    monkeypatch.setattr("tests.simulator.scale.__main__.DEATH_AFTER_S", 1.0)
    with metered_messages(), simulated_exits():
        result = ScaleRun(4, 0, COSTS).run()
    assert result.failed == 0 and result.requests > 50
    assert result.moved > 0 and result.resubmitted_s > 0.0
    assert min(*result.coordinator, *result.ingress, result.manager) > 0.0
    assert result.reports_s > 20 and result.views_mb_s > 0.0
    assert len(result.broken(Limits(0.0, 0.0, 0.0, 0.0))) == 4


def test_an_event_is_charged_its_real_time() -> None:
    """Later events wait for it."""
    kernel = Kernel(0)
    process = MeteredProcess(kernel, "p", "host", COSTS)
    begun: list[float] = []

    def compute() -> None:
        begun.append(kernel.now)
        until_s = time.thread_time() + 0.005
        while time.thread_time() < until_s:
            pass

    for _ in range(3):
        kernel.at(1.0, process, compute)
    kernel.run(2.0)
    assert begun[0] == pytest.approx(1.0) and begun[2] - begun[0] >= 0.01
    assert process.loop_s >= 0.015 and process.io_s == 0.0
