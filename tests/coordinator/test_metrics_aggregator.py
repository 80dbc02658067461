"""Each ingress receives the counts of all others exactly once, also if ingresses come and go."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.coordinator.metrics_aggregator import MetricsAggregator, add

HOUR_S = 3600.0
NAMES = ("first", "second")

messages = st.tuples(
    st.integers(0, 3),  # the ingress that reports
    st.dictionaries(st.sampled_from(NAMES), st.integers(1, 9), max_size=2),  # its new counts
    st.floats(0, HOUR_S / 2),  # seconds since the previous report
)


@given(st.lists(messages, max_size=40))
def test_all_others_are_counted_once(said):
    """All other ingresses are counted once. An ingress that was silent for an hour is dead: a later
    report with its number comes from a new one."""
    metrics_aggregator, now = MetricsAggregator(), 0.0
    spoke: dict[int, float] = {}
    starts: Counter[int] = Counter()
    true: dict[tuple[int, int], Counter[str]] = {}
    for who, more, later in said:
        now += later
        if now - spoke.get(who, now) > HOUR_S:
            starts[who] += 1
        spoke[who] = now
        mine = true.setdefault((who, starts[who]), Counter())
        mine.update(more)
        index = who + 10 * starts[who]
        metrics_aggregator.record(index, {name: [float(mine[name]), 1.0] for name in mine}, now)
        others = [counts for key, counts in true.items() if key != (who, starts[who])]
        assert metrics_aggregator.total_of_others(index) == {
            name: [float(sum(c[name] for c in others)), float(sum(name in c for c in others))]
            for name in NAMES
            if any(name in counts for counts in others)
        }
        for name in NAMES:
            total = metrics_aggregator.total(name)
            assert total[:1] == [float(sum(c[name] for c in true.values()))][: len(total)]
            assert bool(total) == any(name in counts for counts in true.values())


def test_counts_of_dead_ingresses_are_merged():
    metrics_aggregator = MetricsAggregator()
    for index in range(1000):
        metrics_aggregator.record(index, {"n": [1.0]}, index * HOUR_S)
    assert len(metrics_aggregator._newest) <= 6
    assert metrics_aggregator.total_of_others(999) == {"n": [999.0]}


def test_a_coordinator_that_was_stopped_for_hours_counts_no_ingress_twice():
    """A coordinator that was stopped for hours counts no ingress twice, though all seem to have
    been silent that long and then report one by one."""
    metrics_aggregator = MetricsAggregator()
    for index in range(3):
        metrics_aggregator.record(index, {"n": [1.0]}, 0.0)
    for index in range(3):
        metrics_aggregator.record(index, {"n": [2.0]}, 5 * HOUR_S)
    assert [metrics_aggregator.total_of_others(index) for index in range(3)] == [{"n": [4.0]}] * 3


@pytest.mark.parametrize("ingresses", [2, 8, 20, 50, 200])
def test_many_ingresses_need_few_sums(monkeypatch, ingresses):
    """Each ingress receives the counts of all others within two rounds."""
    aggregator, sums = MetricsAggregator(), []
    right = MetricsAggregator._sum_others
    monkeypatch.setattr(
        MetricsAggregator, "_sum_others", lambda self: sums.append(1) or right(self)
    )
    for count in (1.0, 2.0, 3.0):
        sums.clear()
        for index in range(ingresses):
            aggregator.record(index, {"n": [count]}, count)
            total = aggregator.total_of_others(index)
            if count > 1.0:
                assert (count - 2.0) * (ingresses - 1) <= total["n"][0] <= count * (ingresses - 1)
    assert len(sums) <= 8 and len(sums) * ingresses <= 64 + ingresses


def test_add_does_not_modify_its_arguments():
    one, other = {"a": [1.0]}, {"a": [2.0], "b": [3.0]}
    assert add(one, other) == {"a": [3.0], "b": [3.0]}
    assert (one, other) == ({"a": [1.0]}, {"a": [2.0], "b": [3.0]})
