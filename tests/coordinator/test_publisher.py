"""The coordinator publishes within a deadline after the first unpublished change, however busy it
is."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from swell.configs.schema import load
from swell.coordinator.publisher import MAX_REPORTS_PER_LOAD_REPORT_S, ViewPublisher, load_report_s
from swell.coordinator.roster import Roster, join, leave, remove
from swell.coordinator.wire import (
    ClusterReports,
    ClusterView,
    EngineLoad,
    EngineLoads,
    EngineReport,
)
from tests.coordinator.test_roster import member

CONFIG = load(
    {"model": {"path": "m"}, "cluster": {"load_report_s": 1 / 16, "heartbeat_s": 1.0}}
).cluster
"""The times are binary fractions, so that their sums are exact."""


def joined(*ranks: int):
    return lambda roster: join(roster, map(member, ranks))


def publisher_of(*ranks: int) -> ViewPublisher:
    """Returns a `ViewPublisher` that has published everything at time 0."""
    publisher = ViewPublisher(CONFIG)
    publisher.change(joined(*ranks), 0.0)
    assert publisher.due(0.0) is not None
    return publisher


arrivals = st.lists(
    st.tuples(
        st.sampled_from(
            [0, 1 / 1024, 1 / 64, 63 / 1024, 1 / 16, 5 / 16]
        ),  # seconds since the previous report
        st.integers(0, 1),  # rank
        st.integers(0, 2),  # steps: an equal report changes nothing
    ),
    max_size=60,
)


@given(arrivals)
def test_no_change_stays_unpublished_longer_than_the_deadline(pattern) -> None:
    """A loop that sleeps for `wait_s` publishes on time under any traffic.

    Nothing is published late: neither a change after its deadline nor the heartbeat. Nothing is
    published needlessly: each message has a reason, a change or a due heartbeat. A subscriber that
    receives all messages knows all loads.
    """
    publisher, now, heartbeat_at = publisher_of(0, 1), 0.0, 0.0
    known: dict[int, EngineReport] = {}
    shown: dict[int, EngineLoad] = {}
    unpublished_since: float | None = None

    def publish() -> None:
        nonlocal heartbeat_at, unpublished_since
        publication = publisher.due(now)
        if publication is None:  # the load is again the one that was published
            assert unpublished_since is not None
            unpublished_since = None
            assert shown == {rank: EngineLoad.of(report) for rank, report in known.items()}
            return
        if isinstance(publication, ClusterReports):
            assert now - heartbeat_at == CONFIG.heartbeat_s
            assert publication.engines == [known[rank] for rank in sorted(known)]
            heartbeat_at = now
            loads = [EngineLoad.of(report) for report in publication.engines]
        else:
            assert isinstance(publication, EngineLoads) and unpublished_since is not None
            assert now - heartbeat_at < CONFIG.heartbeat_s
            loads = publication.loads
            assert all(load != shown.get(load.rank) for load in loads)
        assert unpublished_since is None or now - unpublished_since <= CONFIG.load_report_s
        assert publication.epoch == publisher.roster.epoch
        shown.update({load.rank: load for load in loads})
        assert shown == {rank: EngineLoad.of(report) for rank, report in known.items()}
        unpublished_since = None

    def run_until(end: float) -> None:
        nonlocal now
        while now + publisher.wait_s(now) <= end:
            now += publisher.wait_s(now)
            publish()
        now = end

    for pause_s, rank, steps in pattern:
        run_until(now + pause_s)
        report = EngineReport(rank, steps=steps)
        if known.get(rank) != report and unpublished_since is None:
            unpublished_since = now
        known[rank] = report
        publisher.report(report, now)
        assert publisher.wait_s(now) <= CONFIG.load_report_s or unpublished_since is None
    run_until(now + 3.0)
    assert unpublished_since is None


def test_continuous_traffic_does_not_push_the_deadline_back() -> None:
    publisher, published = publisher_of(0), []
    for tick in range(1, 1000):
        now = tick / 1024
        publisher.report(EngineReport(0, steps=tick), now)
        if publisher.due(now):
            published.append(tick)
    assert published[0] == 1 + 64
    assert all(b - a == 1 + 64 for a, b in itertools.pairwise(published))


def test_a_new_roster_is_published_at_once() -> None:
    publisher = publisher_of(0)
    for now, step in [
        (0.3, joined(1)),
        (0.302, lambda r: leave(r, [0])),
        (0.5, lambda r: remove(r, [0])),
    ]:
        assert publisher.due(now) is None
        roster = publisher.change(step, now)
        assert publisher.wait_s(now) == 0.0
        view = publisher.due(now)
        assert view is not None and view.roster == roster == publisher.roster
    assert publisher.roster.epoch == 4


def test_no_change_of_the_roster_is_not_published() -> None:
    publisher = publisher_of(0)
    assert publisher.change(lambda r: leave(r, [5]), 0.1) is publisher.roster
    assert publisher.due(0.1) is None


def test_without_changes_there_is_a_heartbeat() -> None:
    publisher = publisher_of(0)
    assert publisher.wait_s(0.0) == CONFIG.heartbeat_s
    assert publisher.due(0.999) is None
    assert publisher.due(1.0) is not None
    assert publisher.due(1.999) is None
    assert publisher.due(2.5) is not None
    assert publisher.wait_s(2.5) == CONFIG.heartbeat_s


def test_reports_of_gone_ranks_are_dropped() -> None:
    publisher = publisher_of(0, 1)
    publisher.report(EngineReport(0, steps=1), 0.1)
    publisher.report(EngineReport(1, steps=2), 0.1)
    publisher.report(EngineReport(7, steps=3), 0.1)
    assert [report.rank for report in publisher.view().reports.engines] == [0, 1]
    publisher.change(lambda roster: remove(roster, [0]), 0.2)
    assert [report.rank for report in publisher.view().reports.engines] == [1]
    publisher.report(EngineReport(0, steps=9), 0.3)
    publisher.change(joined(0), 0.4)
    assert [report.rank for report in publisher.view().reports.engines] == [1], (
        "an old report came back"
    )


def test_reports_of_a_leaving_engine_are_still_accepted() -> None:
    publisher = publisher_of(0)
    publisher.change(lambda roster: leave(roster, [0]), 0.1)
    publisher.report(EngineReport(0, running=2), 0.2)
    assert publisher.view().reports.engines == [EngineReport(0, running=2)]


def test_an_empty_cluster() -> None:
    publisher = ViewPublisher(CONFIG, now=5.0)
    view = publisher.due(5.0)
    assert view is not None and view.roster == Roster() and view.reports.engines == []


def test_a_report_that_changes_no_load_waits_for_the_heartbeat() -> None:
    publisher = publisher_of(0)
    publisher.report(EngineReport(0, steps=1), 0.1)
    assert publisher.due(0.2) == EngineLoads(1, [EngineLoad(0, steps=1)])
    publisher.report(EngineReport(0, steps=1, progress_counter=7), 0.3)
    assert publisher.due(0.4) is None
    reports = publisher.due(1.0)
    assert isinstance(reports, ClusterReports) and reports.engines[0].progress_counter == 7


def test_only_a_new_roster_is_sent_whole() -> None:
    publisher = publisher_of(0)
    assert isinstance(publisher.due(1.0), ClusterReports)
    publisher.change(joined(1), 1.5)
    assert isinstance(publisher.due(1.5), ClusterView)
    assert isinstance(publisher.due(2.5), ClusterReports)


def test_engines_removed_together_cause_one_view() -> None:
    """Engines that leave together cause one view; the view of a thousand engines takes 200 kB."""
    publisher, views = publisher_of(*range(1000)), []
    publisher.report(EngineReport(999, steps=1), 1.0)
    for count in range(20):
        now = 1.0 + count / 64
        publisher.change(lambda roster, gone=count: remove(roster, [gone]), now)
        views.append(publisher.due(now))
    assert isinstance(views[0], ClusterView), "the first one waits"
    assert views[1:] == [None] * 19, "loads of a roster that nobody knows were published"
    assert publisher.wait_s(now) <= 0.5
    last = publisher.due(1.5)
    assert isinstance(last, ClusterView) and len(last.roster.members) == 980
    assert [report.rank for report in last.reports.engines] == [999]


def test_many_engines_report_less_often() -> None:
    """Up to `MAX_REPORTS_PER_LOAD_REPORT_S` engines report at the configured interval; with more,
    the interval grows so that the total rate of reports stays constant."""
    most = MAX_REPORTS_PER_LOAD_REPORT_S
    assert load_report_s(CONFIG, 1) == load_report_s(CONFIG, most) == CONFIG.load_report_s
    assert 4 * most / load_report_s(CONFIG, 4 * most) == most / CONFIG.load_report_s


def test_cluster_wide_values_are_published_as_early_as_loads() -> None:
    publisher, at = publisher_of(0), 0.125 + CONFIG.load_report_s
    assert publisher.due(0.125, has_news=True) is None
    assert publisher.wait_s(0.125) == CONFIG.load_report_s
    assert isinstance(publisher.due(at, has_news=True), ClusterReports)
    assert publisher.due(at) is None
    assert publisher.wait_s(at) == CONFIG.heartbeat_s
