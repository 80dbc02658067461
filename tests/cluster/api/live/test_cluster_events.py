"""Rates and quantiles between two observations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.api.live.cluster_events import quantile, rates_between
from swell.cluster.client.metrics import FIRST_TOKEN_BOUNDS_S, Histogram, PrometheusStats
from swell.cluster.client.requests.stats import IterationStats
from swell.coordinator.wire import EngineReport


@given(st.lists(st.floats(0.0001, 600.0), min_size=1), st.sampled_from([0.5, 0.99]))
def test_a_quantile_lies_in_the_bucket_of_the_exact_one(values: list[float], share: float) -> None:
    histogram = Histogram("x", "x", FIRST_TOKEN_BOUNDS_S)
    histogram.observe(*values)
    exact = float(np.quantile(values, share, method="inverted_cdf"))
    found = quantile(histogram.numbers[:-1], FIRST_TOKEN_BOUNDS_S, share)
    bounds = (0.0, *FIRST_TOKEN_BOUNDS_S)
    place = int(np.searchsorted(FIRST_TOKEN_BOUNDS_S, exact))
    assert found is not None
    assert bounds[place] - 1e-6 <= found <= bounds[place + 1] + 1e-6


def test_there_is_no_quantile_of_nothing() -> None:
    assert quantile([0.0, 0.0], (1.0,), 0.5) is None


def test_rates_are_increases_over_time() -> None:
    stats = PrometheusStats()
    assert stats.totals() == {}
    stats.set_other_counts({})
    before = stats.totals()
    stats.record(IterationStats(num_prompt_tokens=30, num_output_tokens=10))
    reports = [EngineReport(0, running=2), EngineReport(1, running=1, waiting=4)]
    found = rates_between(before, stats.totals(), 5.0, 2.0, reports)
    assert (found.prompt_tokens_per_s, found.tokens_per_s) == pytest.approx((15.0, 5.0))
    assert (found.running, found.waiting, found.ttft_p50_s) == (3, 4, None)
    first = rates_between({}, stats.totals(), 5.0, 2.0, [])
    assert first.tokens_per_s == 0, "the counts before are not known"
