"""When the coordinator publishes: a deadline after the first unpublished change, however busy it
is."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from swell.configs.schema import load
from swell.coordinator.cluster_state import ClusterState
from swell.coordinator.roster import Roster, join, leave, remove
from swell.coordinator.wire import EngineReport
from tests.coordinator.test_roster import member

CONFIG = load(
    {"model": {"path": "m"}, "cluster": {"load_report_s": 1 / 16, "heartbeat_s": 1.0}}
).cluster
"""Times are binary fractions here, so that sums of them are exact."""


def joined(*ranks: int):
    return lambda roster: join(roster, map(member, ranks))


def cluster_state_of(*ranks: int) -> ClusterState:
    """A cluster_state that has published everything at time 0."""
    cluster_state = ClusterState(CONFIG)
    cluster_state.change(joined(*ranks), 0.0)
    assert cluster_state.due(0.0) is not None
    return cluster_state


arrivals = st.lists(
    st.tuples(
        st.sampled_from(
            [0, 1 / 1024, 1 / 64, 63 / 1024, 1 / 16, 5 / 16]
        ),  # seconds since the one before
        st.integers(0, 1),  # rank
        st.integers(0, 2),  # steps: equal reports are no change
    ),
    max_size=60,
)


@given(arrivals)
def test_no_change_stays_unpublished_longer_than_the_deadline(pattern) -> None:
    """A loop that sleeps as the cluster_state says, under any traffic.

    Nothing is published late: neither a change after its deadline nor the heartbeat. Nothing is
    published needlessly: each view has a reason, a change or the silence of a heartbeat.
    """
    cluster_state, now, published_at = cluster_state_of(0, 1), 0.0, 0.0
    known: dict[int, EngineReport] = {}
    unpublished_since: float | None = None

    def run_until(end: float) -> None:
        nonlocal now, published_at, unpublished_since
        while now + cluster_state.wait_s(now) <= end:
            now += cluster_state.wait_s(now)
            view = cluster_state.due(now)
            assert view is not None
            since_change = None if unpublished_since is None else now - unpublished_since
            if since_change is None:
                assert now - published_at == CONFIG.heartbeat_s
            else:
                assert since_change <= CONFIG.load_report_s
            assert view.reports == [known[rank] for rank in sorted(known)]
            published_at, unpublished_since = now, None
        now = end

    for pause_s, rank, steps in pattern:
        run_until(now + pause_s)
        report = EngineReport(rank, steps=steps)
        if known.get(rank) != report and unpublished_since is None:
            unpublished_since = now
        known[rank] = report
        cluster_state.report(report, now)
        assert cluster_state.due(now) is None or unpublished_since is not None
        assert cluster_state.wait_s(now) <= CONFIG.load_report_s or unpublished_since is None
    run_until(now + 3.0)
    assert unpublished_since is None


def test_continuous_traffic_does_not_push_the_deadline_back() -> None:
    cluster_state, published = cluster_state_of(0), []
    for tick in range(1, 1000):
        now = tick / 1024
        cluster_state.report(EngineReport(0, steps=tick), now)
        if cluster_state.due(now):
            published.append(tick)
    assert published[0] == 1 + 64
    assert all(b - a == 1 + 64 for a, b in itertools.pairwise(published))


def test_a_new_roster_is_published_at_once() -> None:
    cluster_state = cluster_state_of(0)
    for now, step in [
        (0.3, joined(1)),
        (0.3001, lambda r: leave(r, [0])),
        (0.5, lambda r: remove(r, [0])),
    ]:
        assert cluster_state.due(now) is None
        roster = cluster_state.change(step, now)
        assert cluster_state.wait_s(now) == 0.0
        view = cluster_state.due(now)
        assert view is not None and view.roster == roster == cluster_state.roster
    assert cluster_state.roster.epoch == 4


def test_no_change_of_the_roster_is_not_published() -> None:
    cluster_state = cluster_state_of(0)
    assert cluster_state.change(lambda r: leave(r, [5]), 0.1) is cluster_state.roster
    assert cluster_state.due(0.1) is None


def test_without_changes_there_is_a_heartbeat() -> None:
    cluster_state = cluster_state_of(0)
    assert cluster_state.wait_s(0.0) == CONFIG.heartbeat_s
    assert cluster_state.due(0.999) is None
    assert cluster_state.due(1.0) is not None
    assert cluster_state.due(1.999) is None
    assert cluster_state.due(2.5) is not None
    assert cluster_state.wait_s(2.5) == CONFIG.heartbeat_s


def test_reports_of_gone_ranks_are_dropped() -> None:
    cluster_state = cluster_state_of(0, 1)
    cluster_state.report(EngineReport(0, steps=1), 0.1)
    cluster_state.report(EngineReport(1, steps=2), 0.1)
    cluster_state.report(EngineReport(7, steps=3), 0.1)
    assert [report.rank for report in cluster_state.view().reports] == [0, 1]
    cluster_state.change(lambda roster: remove(roster, [0]), 0.2)
    assert [report.rank for report in cluster_state.view().reports] == [1]
    cluster_state.report(EngineReport(0, steps=9), 0.3)
    cluster_state.change(joined(0), 0.4)
    assert [report.rank for report in cluster_state.view().reports] == [1], (
        "an old report came back"
    )


def test_a_leaving_engine_is_still_heard() -> None:
    cluster_state = cluster_state_of(0)
    cluster_state.change(lambda roster: leave(roster, [0]), 0.1)
    cluster_state.report(EngineReport(0, running=2), 0.2)
    assert cluster_state.view().reports == [EngineReport(0, running=2)]


def test_an_empty_cluster_state() -> None:
    cluster_state = ClusterState(CONFIG, now=5.0)
    view = cluster_state.due(5.0)
    assert view is not None and view.roster == Roster() and view.reports == []
