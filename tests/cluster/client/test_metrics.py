"""Our metrics render like those of prometheus_client, and show the counts of all ingresses
together."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Counter as TheirCounter
from prometheus_client import Histogram as TheirHistogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from swell.cluster.client.metrics import Counter, Histogram, PrometheusStats
from swell.cluster.client.requests.stats import FinishedRequestStats, IterationStats

BOUNDS = (0.001, 0.5, 1.0, 640.0)
REASONS = ("stop", "length", "abort", "error")


class Only(Collector):
    def __init__(self, part: Histogram | Counter) -> None:
        self._part = part

    def collect(self) -> Iterator[Metric]:
        yield self._part.to_family(self._part.numbers)


def shown(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


def shown_by_itself(part: Histogram | Counter) -> list[str]:
    registry = CollectorRegistry()
    registry.register(Only(part))
    return shown(registry)


@given(st.lists(st.sampled_from(BOUNDS) | st.floats(0, 1000)))
def test_a_histogram_renders_like_prometheus_client(values: list[float]):
    theirs = CollectorRegistry()
    one = Histogram("name", "What it is.", BOUNDS)
    other = TheirHistogram("swell_name", "What it is.", buckets=BOUNDS, registry=theirs)
    for value in values:
        one.observe(value)
        other.observe(value)
    assert shown_by_itself(one) == shown(theirs)


@given(st.lists(st.tuples(st.sampled_from(REASONS), st.floats(0, 1000))))
def test_a_counter_renders_like_prometheus_client(values: list[tuple[str, float]]):
    theirs = CollectorRegistry()
    one = Counter("name", "What it is.", "reason", REASONS)
    plain = Counter("plain", "What it is.")
    other = TheirCounter("swell_name", "What it is.", ["reason"], registry=theirs)
    bare_theirs = CollectorRegistry()
    bare = TheirCounter("swell_plain", "What it is.", registry=bare_theirs)
    for reason in REASONS:
        other.labels(reason)
    for reason, value in values:
        one.inc(value, reason)
        other.labels(reason).inc(value)
        plain.inc(value)
        bare.inc(value)
    assert shown_by_itself(one) == shown(theirs)
    assert shown_by_itself(plain) == shown(bare_theirs)


seconds = st.integers(0, 800).map(lambda eighths: eighths / 8)  # their sums are exact
finished = st.builds(
    FinishedRequestStats,
    finish_reason=st.sampled_from(REASONS),
    num_prompt_tokens=st.integers(0, 5000),
    num_output_tokens=st.integers(0, 5000),
    e2e_s=seconds,
    queue_s=seconds,
    prefill_s=seconds,
    decode_s=seconds,
)
iterations = st.builds(
    IterationStats,
    num_prompt_tokens=st.integers(0, 99),
    num_output_tokens=st.integers(0, 99),
    time_to_first_token_s=st.lists(seconds, max_size=3),
    inter_token_latency_s=st.lists(seconds, max_size=3),
    finished=st.lists(finished, max_size=3),
)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), iterations), max_size=12))
def test_any_ingress_shows_the_metrics_of_a_single_ingress(seen: list[tuple[bool, IterationStats]]):
    alone, one, other = PrometheusStats(), PrometheusStats(), PrometheusStats()
    for here, stats in seen:
        alone.record(stats)
        (one if here else other).record(stats)
    one.set_other_counts(other.counts())
    other.set_other_counts(one.counts())
    alone.set_other_counts({})
    assert one.render() == other.render() == alone.render()


def test_an_ingress_that_does_not_know_the_others_shows_no_counters():
    """Otherwise its first scrape would show lower counters than the last scrape of its
    predecessor."""
    stats = PrometheusStats()
    stats.resubmitted()
    assert stats.render() == b""
    stats.set_other_counts({})
    assert b"swell_resubmitted_requests_total 1.0" in stats.render()


def test_the_sums_never_shrink():
    stats, others = PrometheusStats(), PrometheusStats()
    others.resubmitted()
    others.refused("too_many_waiting_requests")
    stats.set_other_counts(others.counts())
    forgetful = PrometheusStats()
    forgetful.refused("too_many_waiting_requests")
    forgetful.refused("too_many_waiting_requests")
    stats.set_other_counts(forgetful.counts())
    text = stats.render()
    assert b"swell_resubmitted_requests_total 1.0" in text
    assert b'swell_refused_requests_total{reason="too_many_waiting_requests"} 2.0' in text
