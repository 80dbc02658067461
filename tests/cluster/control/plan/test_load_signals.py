"""The load of a cluster, computed from reports and counts as they arrive."""

from __future__ import annotations

import math
from bisect import bisect_left

import pytest

from swell.cluster.client.metrics import FIRST_TOKEN_BOUNDS_S
from swell.cluster.control.plan.load_signals import Load, LoadSeries, quantile
from swell.coordinator.roster import Roster
from swell.coordinator.wire import ClusterReports, ClusterView, EngineReport


def view(*reports: EngineReport) -> ClusterView:
    return ClusterView(Roster(), ClusterReports(engines=list(reports)))


def counts(*times_s: float) -> list[float]:
    """Returns the histogram of these times as an ingress counts first tokens."""
    numbers = [0.0] * (len(FIRST_TOKEN_BOUNDS_S) + 2)
    for time_s in times_s:
        numbers[bisect_left(FIRST_TOKEN_BOUNDS_S, time_s)] += 1
        numbers[-1] += time_s
    return numbers


def observe(series: LoadSeries, now: float, waiting: int, started: int) -> Load:
    report = EngineReport(0, 1, running=4, waiting=waiting, started_requests=started)
    load = series.observe(view(report), [], [0], now)
    assert load is not None
    return load


def test_the_queue_time_is_the_queue_divided_by_the_start_rate() -> None:
    series = LoadSeries()
    for tick in range(6):
        load = observe(series, 2.0 * tick, 30, 10 * tick)
    assert load.queue_s == pytest.approx(30 / 5.0)
    assert load.drained_s == math.inf, "it becomes no less"


def test_a_shrinking_queue_has_a_time_until_it_is_empty() -> None:
    series = LoadSeries()
    for tick, waiting in enumerate((50, 40, 30)):
        load = observe(series, 2.0 * tick, waiting, 10 * tick)
    assert load.drained_s == pytest.approx(30 / 5.0)


def test_without_starts_the_queue_time_is_long() -> None:
    series = LoadSeries()
    assert observe(series, 0.0, 0, 7).queue_s == 0.0
    assert observe(series, 2.0, 3, 7).queue_s == 30.0


def test_blocks_are_an_average_over_the_engines_that_stay() -> None:
    reports = [EngineReport(rank, kv_usage=usage) for rank, usage in enumerate((0.2, 0.6, 0.9))]
    load = LoadSeries().observe(view(*reports), [], [0, 1], 0.0)
    assert load == Load(2, kv_usage=0.4)


def test_an_engine_without_a_report_makes_the_load_unknown() -> None:
    assert LoadSeries().observe(view(EngineReport(0)), [], [0, 1], 0.0) is None
    assert LoadSeries().observe(view(), [], [], 0.0) is None


def test_first_tokens_of_the_last_seconds_count() -> None:
    series, seen = LoadSeries(), [0.3] * 100
    first = series.observe(view(EngineReport(0)), counts(*seen), [0], 0.0)
    assert first is not None and first.ttft_s is None, "they are older"
    seen += [0.05] * 12
    later = series.observe(view(EngineReport(0)), counts(*seen), [0], 2.0)
    assert later is not None and later.ttft_s is not None and later.ttft_s <= 0.06
    for tick in range(2, 12):
        load = series.observe(view(EngineReport(0)), counts(*seen), [0], 2.0 * tick)
    assert load is not None and load.ttft_s is None, "nobody asks any more"


def test_a_restarted_coordinator_causes_no_negative_counts() -> None:
    series = LoadSeries()
    series.observe(view(EngineReport(0)), counts(*[0.3] * 100), [0], 0.0)
    series.observe(view(EngineReport(0)), counts(*[0.3] * 20), [0], 2.0)
    load = series.observe(view(EngineReport(0)), counts(*[0.3] * 20, *[2.0] * 20), [0], 4.0)
    assert load is not None and load.ttft_s is not None and 1.0 < load.ttft_s <= 2.5


def test_the_quantile_is_interpolated_in_its_bucket() -> None:
    assert quantile((1.0, 2.0), [9.0, 0.0, 0.0]) is None, "too few"
    assert quantile((1.0, 2.0), [10.0, 0.0, 0.0]) == pytest.approx(0.9)
    assert quantile((1.0, 2.0), [80.0, 20.0, 0.0]) == pytest.approx(1.5)
    assert quantile((1.0, 2.0), [0.0, 0.0, 10.0]) == 2.0, "it has no upper bound"
