"""Our histogram shows what prometheus_client's shows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as TheirHistogram

from swell.cluster.metrics import Histogram

BOUNDS = (0.001, 0.5, 1.0, 640.0)


def shown(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


@given(st.lists(st.sampled_from(BOUNDS) | st.floats(0, 1000)))
def test_it_shows_what_theirs_shows(values: list[float]):
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    one = Histogram("name", "What it is.", BOUNDS)
    ours.register(one)
    other = TheirHistogram("name", "What it is.", buckets=BOUNDS, registry=theirs)
    for value in values:
        one.observe(value)
        other.observe(value)
    assert shown(ours) == shown(theirs)
