"""Admission control on a scripted clock: which requests may wait, and when refused ones should
return."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swell.cluster.client.routing.admission import (
    DEFAULT_RETRY_S,
    MAX_RETRY_S,
    WINDOW_S,
    Admission,
    Backlog,
    StartRate,
    TooManyWaiting,
    waiting_here,
)
from swell.cluster.client.routing.router import Router
from swell.coordinator import roster as rosters
from swell.coordinator.roster import Member, Roster
from swell.coordinator.transport.channel import ChannelAddress
from swell.coordinator.wire import ClusterReports, ClusterView, EngineReport
from tests.cluster.client.scripted_cluster import ScriptedCluster, run

MANY = 10**9
ROWS = 8


def view(*reports: EngineReport) -> ClusterView:
    return ClusterView(Roster(), ClusterReports(engines=list(reports)))


def started(requests: int, tokens: int = 0, rank: int = 0, incarnation: int = 1) -> EngineReport:
    return EngineReport(
        rank, incarnation, started_requests=requests, started_tokens=tokens or 10 * requests
    )


def admission(limit: int = 100, tokens: int = MANY, ingresses: int = 1, *, rate: int = 0):
    """Returns an `Admission` at time 10.0. In each second before, engines began `rate` requests of
    ten tokens."""
    made = Admission(limit, tokens, ingresses)
    for second in range(11):
        made.observe(view(started(second * rate)), float(second))
    return made


def refusal(one: Admission, backlog: Backlog, now: float = 10.0) -> TooManyWaiting:
    with pytest.raises(TooManyWaiting) as caught:
        one.check(backlog, now)
    return caught.value


# -------------------------------------------------------------------------------- the bound


def test_a_request_is_accepted_only_below_the_bound():
    one = admission(100)
    one.check(Backlog(requests=60, own_requests=39), 10.0)
    error = refusal(one, Backlog(requests=60, own_requests=40))
    assert error.code == "too_many_waiting_requests"
    assert "100 requests already wait" in str(error) and "serve.max_waiting_requests=100" in str(
        error
    )
    one.check(Backlog(requests=60, own_requests=39), 10.0)


def test_tokens_have_a_bound_of_their_own():
    one = admission(100, 5000)
    one.check(Backlog(1, 4000, 1, 999), 10.0)
    error = refusal(one, Backlog(1, 4000, 1, 1000))
    assert error.code == "too_many_waiting_tokens"
    assert "5000 tokens already wait" in str(error) and "serve.max_waiting_tokens=5000" in str(
        error
    )


@given(limit=st.integers(1, 50), ingresses=st.integers(1, 5), reported=st.integers(0, 60))
def test_ingresses_with_the_same_view_keep_the_bound_together(limit, ingresses, reported):
    """Each ingress keeps the bound without knowing what the others admit."""
    admitted = 0
    for _ in range(ingresses):
        one = Admission(limit, MANY, ingresses)
        for own in itertools.count():
            try:
                one.check(Backlog(requests=reported, own_requests=own), 0.0)
            except TooManyWaiting:
                break
            admitted += 1
    assert reported + admitted <= max(reported, limit + ingresses - 1)
    assert reported + admitted >= limit, "what fits is not refused"


@given(
    limit=st.integers(10, 400),
    turns=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 99)), min_size=1, max_size=60),
)
def test_an_ingress_with_a_late_view_exceeds_the_bound_by_a_quarter_at_most(limit, turns):
    """The second ingress receives each report only when the next one is made. Engines compute
    nothing meanwhile."""
    both = [Admission(limit, MANY, 2) for _ in range(2)]
    sent = [0, 0]
    heard = [(0, 0), (0, 0)]
    """Ingress -> all requests that its latest report counts, and the part that it sent itself."""
    reports = [(0, 0, 0)]
    for who, count in turns:
        for _ in range(count):
            all_told, own_told = heard[who]
            try:
                both[who].check(Backlog(all_told, 0, sent[who] - own_told), 0.0)
            except TooManyWaiting:
                break
            sent[who] += 1
        reports.append((sum(sent), *sent))
        for ingress, newest in enumerate((reports[-1], reports[-2])):
            heard[ingress] = (newest[0], newest[1 + ingress])
        assert sum(sent) <= 1.25 * limit + 2


# -------------------------------------------------------------------------------- when to return


def test_retry_after_is_the_time_until_the_queue_has_room():
    """Ten requests begin per second, and 30 must begin before the queue has room for one more."""
    one = admission(100, rate=10)
    assert refusal(one, Backlog(requests=129)).retry_after_s == 3


def test_the_token_bound_uses_the_rate_of_tokens():
    one = admission(100, 5000, rate=10)
    assert refusal(one, Backlog(requests=50, tokens=5999)).retry_after_s == 10


def test_retry_times_of_refused_clients_are_spread():
    """Ten requests begin per second, so of 100 simultaneous refusals ten are told to return in each
    second."""
    one = admission(100, rate=10)
    told = [refusal(one, Backlog(requests=100)).retry_after_s for _ in range(100)]
    assert told == sorted(told)
    assert [told.count(second) for second in range(1, 11)] == [10] * 10


def test_several_ingresses_share_the_start_rate():
    one = admission(100, ingresses=2, rate=10)
    told = [refusal(one, Backlog(requests=100)).retry_after_s for _ in range(50)]
    assert [told.count(second) for second in range(1, 11)] == [5] * 10


def test_promised_places_expire():
    one = admission(100, rate=10)
    for _ in range(100):
        refusal(one, Backlog(requests=100))
    for second in range(11, 21):
        one.observe(view(started(second * 10)), float(second))
    assert refusal(one, Backlog(requests=100), 20.0).retry_after_s == 1


def test_retry_after_has_a_limit():
    one = admission(100, rate=1)
    told = [refusal(one, Backlog(requests=5000)).retry_after_s for _ in range(500)]
    assert set(told) == {MAX_RETRY_S}


def test_without_starts_retry_after_is_the_default():
    assert refusal(admission(100), Backlog(requests=100)).retry_after_s == DEFAULT_RETRY_S
    stalled = admission(100, rate=10)
    late = 10.0 + 2 * WINDOW_S
    stalled.observe(view(started(100)), late)
    assert refusal(stalled, Backlog(requests=100), late).retry_after_s == DEFAULT_RETRY_S


def test_without_started_tokens_retry_after_is_the_default():
    one = Admission(100, 50, 1)
    for second in range(11):
        report = EngineReport(0, 1, started_requests=second, started_tokens=0)
        one.observe(view(report), float(second))
    assert refusal(one, Backlog(tokens=60)).retry_after_s == DEFAULT_RETRY_S


# -------------------------------------------------------------------------------- the rate


def test_the_rate_covers_the_last_seconds():
    rate = StartRate()
    for second in range(21):
        rate.observe(view(started(100 * min(second, 10))), float(second))
    assert rate.of(20.0).requests == 0.0
    rate.observe(view(started(1050, 10_500)), 25.0)
    assert rate.of(25.0) == (5.0, 50.0)


def test_membership_changes_do_not_count_as_starts():
    rate = StartRate()
    rate.observe(view(started(500)), 0.0)
    rate.observe(view(started(510), started(9000, rank=1)), 5.0)
    assert rate.of(5.0).requests == 2.0
    rate.observe(view(started(9010, rank=1)), 10.0)
    rate.observe(view(started(3, incarnation=2), started(9010, rank=1)), 10.0)
    assert rate.of(10.0).requests == 2.0


def test_an_initial_burst_does_not_inflate_the_rate():
    rate = StartRate()
    rate.observe(view(started(0)), 0.0)
    rate.observe(view(started(50)), 0.1)
    assert rate.of(0.1).requests == 50.0, "of a second, not of a tenth"


# ------------------------------------------------------------------------------- the backlog


def test_new_requests_fill_free_rows_before_they_count_as_waiting():
    idle = EngineReport(0, running=3)
    assert waiting_here(idle, 5, 50, ROWS) == Backlog(0, 0, 0, 50)
    assert waiting_here(idle, 7, 70, ROWS) == Backlog(0, 0, 2, 70)
    short_of_blocks = EngineReport(0, running=3, waiting=2, waiting_tokens=20)
    assert waiting_here(short_of_blocks, 5, 50, ROWS) == Backlog(2, 20, 5, 50)


def joined(router: Router, *reports: EngineReport) -> ClusterView:
    address = ChannelAddress("machine", "ipc://@x", "tcp://127.0.0.1:1")
    members = [Member(report.rank, address, incarnation=7) for report in reports]
    told = ClusterView(rosters.join(Roster(), members), ClusterReports(engines=list(reports)))
    router.update(told)
    return told


def test_sent_requests_count_until_reports_include_them():
    router = Router(4)
    assert router.backlog(0) == Backlog()
    told = joined(router, EngineReport(0, 7))
    first, second, _ = [router.choose(name, [1, 2, 3, 4, 5]) for name in "abc"]
    # One token of "b" and "c" must be computed again: the block before it was sent for "a".
    assert router.backlog(0) == Backlog(0, 0, 3, 5 + 1 + 1)
    first.on_first_token()
    second.release()
    assert router.backlog(0) == Backlog(0, 0, 1, 1)
    report = EngineReport(0, 7, waiting=1, waiting_tokens=1, steps=1)
    router.update(ClusterView(told.roster, ClusterReports(engines=[report])))
    assert router.backlog(0) == Backlog(1, 1, 1, 1), "it may have been written before"
    router.update(
        ClusterView(told.roster, ClusterReports(engines=[EngineReport(0, 7, waiting=1, steps=2)]))
    )
    assert router.backlog(0) == Backlog(1, 0, 0, 0)


def test_a_repeated_report_with_new_progress_counts_no_new_start():
    """An engine that is inside a long step has not received anything since its last report."""
    router = Router(4)
    told = joined(router, EngineReport(0, 7, steps=1))
    router.choose("a", [1, 2, 3])
    for progress_counter in range(1, 9):
        router.update(
            ClusterView(
                told.roster,
                ClusterReports(
                    engines=[EngineReport(0, 7, steps=1, progress_counter=progress_counter)]
                ),
            )
        )
    assert router.backlog(0) == Backlog(0, 0, 1, 3)


# --------------------------------------------------------------------------- with real engines


def test_engines_report_started_requests_and_tokens():
    def scenario(cluster: ScriptedCluster) -> None:
        core = cluster.join(0, num_blocks=7)
        cluster.submit([1, 2, 3, 4, 5, 6, 7, 8], 9)
        cluster.submit([9, 2, 3, 4, 5, 6, 7, 8], 9)
        while core.scheduler.has_requests:
            cluster.step(0, 1.0)
        assert core.scheduler.num_preemptions == 1
        cluster.publish()
        (report,) = cluster.llm.view.reports.engines
        assert (report.started_requests, report.started_tokens) == (2, 16)

    run(scenario)


def refused(cluster: ScriptedCluster) -> bool:
    try:
        cluster.llm.check_admission()
    except TooManyWaiting:
        return True
    return False


def test_the_bound_counts_requests_at_engines_and_at_the_ingress():
    """The bound counts requests in an engine's queue, on the way to it, or without an engine."""

    def scenario(cluster: ScriptedCluster) -> None:
        cluster.join(0)
        for count in range(6):
            assert not refused(cluster), count
            cluster.submit([count, 2, 3], 2)
        assert refused(cluster), "two have a row, and four wait"
        cluster.publish()
        cluster.publish()
        assert refused(cluster), "the engine says so too"
        cluster.lose(0)
        assert refused(cluster), "they wait for an engine"
        cluster.join(1)
        assert len(cluster.cores[1].scheduler.requests) == 6, "none of them was refused"
        assert refused(cluster)
        for _ in range(3):
            cluster.step(1, 1.0)
            cluster.publish()
        assert not refused(cluster)

    shown = run(scenario, scheduler__max_rows=2, serve__max_waiting_requests=4)
    assert shown["refused_requests_total"] == 4.0


def test_an_outdated_report_stops_refusing_requests():
    """If the coordinator is down, reports stop while the engines continue."""

    def scenario(cluster: ScriptedCluster) -> None:
        cluster.join(0)
        for count in range(6):
            cluster.submit([count, 2, 3], 2)
        cluster.publish()
        cluster.publish()
        assert refused(cluster), "two have a row, and four wait"
        while cluster.cores[0].scheduler.has_requests:
            cluster.step(0, 0.0)
        cluster.now += cluster.config.cluster.heartbeat_s
        assert refused(cluster), "the next report may be on its way"
        cluster.now += 5 * cluster.config.cluster.heartbeat_s
        for count in range(6):
            assert not refused(cluster), count
            cluster.submit([count, 2, 3], 2)
        assert refused(cluster), "what this ingress sent still has its bound"
        cluster.publish()
        cluster.publish()
        assert refused(cluster), "the engine says so too"

    run(scenario, scheduler__max_rows=2, serve__max_waiting_requests=4)


def test_tokens_that_wait_for_an_engine_count():
    def scenario(cluster: ScriptedCluster) -> None:
        cluster.join(0)
        cluster.lose(0)
        states = cluster.submit([1] * 10, 2)
        assert refused(cluster)
        cluster.abort(states)
        assert not refused(cluster)

    run(scenario, serve__max_waiting_tokens=10)
