"""The response store answers like a reference model: a plain list that is searched for every
request."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.api.store.response_store import (
    LEASE_S,
    MAX_LOST_RUNNERS,
    Begin,
    Cancel,
    Delete,
    Heartbeat,
    HeartbeatReply,
    Job,
    Read,
    ResponseReply,
    ResponseRequest,
    ResponseStore,
    RunnerExit,
    Store,
    StoredLookup,
    StoredResponse,
    StoredStatus,
)

LIMIT, LIMIT_BYTES, LIMIT_S = 4, 100, 60.0
IDS = ["a", "b", "c", "d", "e", "f"]
RUNNERS = ["one", "two"]


@dataclass
class Row:
    id: str
    kept: StoredResponse
    fate: StoredStatus
    stored_at_s: float
    runner: str = ""
    last_heartbeat_s: float = 0.0
    deleted: bool = False
    job: Job | None = None
    losses: int = 0

    @property
    def size_bytes(self) -> int:
        runs = self.fate is StoredStatus.RUNNING and self.job is not None
        return self.kept.size_bytes + (self.job.size_bytes if runs else 0)


class PlainStore:
    """The reference model of the store: the same rules on a list, least recently used first,
    without running counts."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.seen_s: float | None = None
        self.listened_s = 0.0

    def handle(self, request: ResponseRequest, now_s: float) -> ResponseReply:
        gap_s = 0.0 if self.seen_s is None else now_s - self.seen_s
        self.listened_s += min(gap_s, LEASE_S / 4)
        self.seen_s = now_s
        orders = HeartbeatReply([], [], [])
        if isinstance(request, Heartbeat):
            self.heartbeat(request.runner, request.ids, orders)
        for row in list(self.rows):
            if row.fate is not StoredStatus.RUNNING or row.deleted:
                continue
            if row.runner and self.listened_s - row.last_heartbeat_s > LEASE_S:
                row.runner, row.losses = "", row.losses + 1
                if row.losses == MAX_LOST_RUNNERS:
                    self.end(row, StoredStatus.LOST, now_s)
            elif not row.runner and now_s - row.stored_at_s > LIMIT_S:
                self.end(row, StoredStatus.LOST, now_s)
        self.rows = [row for row in self.rows if not self.is_over(row, now_s)]
        match request:
            case Store(id, kept, runner):
                return self.store(Row(id, kept, StoredStatus.DONE, now_s, runner))
            case Begin(id, kept, runner, job, losses):
                row = Row(
                    id, kept, StoredStatus.RUNNING, now_s, runner, self.listened_s, False, job
                )
                row.losses = losses
                return self.named(id) is None and self.put(row)
            case Heartbeat(runner):
                self.take(runner, request.takes, orders)
                return orders
            case RunnerExit(runner):
                for row in self.rows:
                    if row.runner == runner and not row.deleted:
                        row.runner = ""
                return True
            case Read(id):
                return self.found(id)
            case Cancel(id):
                row = self.named(id)
                if row is not None and not row.deleted and row.fate is StoredStatus.RUNNING:
                    self.end(row, StoredStatus.CANCELLED, now_s)
                return self.found(id)
            case Delete(id):
                found = self.found(id)
                row = self.named(id)
                if row is not None and not row.deleted:
                    row.deleted = True
                    row.last_heartbeat_s = self.listened_s
                    if row.fate is not StoredStatus.RUNNING:
                        self.rows.remove(row)
                return found

    def end(self, row: Row, fate: StoredStatus, now_s: float) -> None:
        """Marks a response as finished and as used now."""
        row.fate, row.stored_at_s = fate, now_s
        self.rows.remove(row)
        self.rows.append(row)

    def is_over(self, row: Row, now_s: float) -> bool:
        if row.deleted:
            return self.listened_s - row.last_heartbeat_s > LEASE_S
        return row.fate is not StoredStatus.RUNNING and now_s - row.stored_at_s > LIMIT_S

    def named(self, id: str) -> Row | None:
        return next((row for row in self.rows if row.id == id), None)

    def found(self, id: str) -> StoredLookup | None:
        row = self.named(id)
        if row is None or row.deleted:
            return None
        if row.fate is not StoredStatus.RUNNING:
            self.rows.remove(row)
            self.rows.append(row)
        return StoredLookup(row.kept, row.fate)

    def store(self, row: Row) -> bool:
        before = self.named(row.id)
        if before is None:
            return self.put(row)
        if before.deleted or before.fate is not StoredStatus.RUNNING:
            is_same = before.fate is StoredStatus.DONE and before.kept == row.kept
            return is_same and not before.deleted
        if before.runner not in ("", row.runner):
            return False
        place = self.rows.index(before)
        self.rows.remove(before)
        done = self.put(row)
        if not done:
            self.rows.insert(place, before)
        return done

    def put(self, row: Row) -> bool:
        def fits(rows: list[Row]) -> bool:
            sizes = [one.size_bytes for one in rows if not one.deleted]
            return len(sizes) < LIMIT and sum(sizes) + row.size_bytes <= LIMIT_BYTES

        if not fits([one for one in self.rows if one.fate is StoredStatus.RUNNING]):
            return False
        while not fits(self.rows):
            self.rows.remove(
                next(o for o in self.rows if o.fate is not StoredStatus.RUNNING and not o.deleted)
            )
        self.rows.append(row)
        return True

    def take(self, runner: str, takes: int, orders: HeartbeatReply) -> None:
        """Assigns waiting responses to the runner in the order in which they were begun."""
        for row in self.rows:
            waits = row.fate is StoredStatus.RUNNING and not row.runner and not row.deleted
            if row.losses == MAX_LOST_RUNNERS - 1:
                mine = [other for other in self.rows if other.runner == runner]
                runs = [o for o in mine if o.fate is StoredStatus.RUNNING and not o.deleted]
                waits = waits and all(other.losses < row.losses for other in runs)
            if waits and row.job is not None and len(orders.taken) < takes:
                row.runner, row.last_heartbeat_s = runner, self.listened_s
                orders.taken.append(Begin(row.id, row.kept, runner, row.job, row.losses))

    def heartbeat(self, runner: str, ids: list[str], orders: HeartbeatReply) -> None:
        for id in ids:
            row = self.named(id)
            if row is None:
                orders.unknown.append(id)
                continue
            if row.deleted:
                row.last_heartbeat_s = self.listened_s
            if (
                row.deleted
                or row.fate is not StoredStatus.RUNNING
                or row.runner not in ("", runner)
            ):
                orders.stop.append(id)
            else:
                row.runner, row.last_heartbeat_s = runner, self.listened_s


def kept(size: int) -> StoredResponse:
    return StoredResponse(b"x" * (size // 2), b"y" * (size - size // 2))


ids = st.sampled_from(IDS)
bodies = st.builds(kept, st.integers(0, 60))
jobs = st.builds(Job, st.binary(max_size=9))
requests = st.one_of(
    st.builds(Store, ids, bodies, st.sampled_from(["", *RUNNERS])),
    st.builds(Begin, ids, bodies, st.sampled_from(RUNNERS), jobs, st.integers(0, 2)),
    st.builds(
        Heartbeat,
        st.sampled_from(RUNNERS),
        st.lists(ids, max_size=4, unique=True),
        st.integers(0, 2),
    ),
    st.builds(RunnerExit, st.sampled_from(RUNNERS)),
    st.builds(Read, ids),
    st.builds(Cancel, ids),
    st.builds(Delete, ids),
)
steps = st.sampled_from([0.0, 1.0, 2.0, LEASE_S / 4, LEASE_S, LIMIT_S + 1])


@given(st.lists(st.tuples(requests, steps), max_size=60))
@settings(max_examples=300, deadline=None)
def test_the_store_agrees_with_a_plain_list(history: list[tuple[ResponseRequest, float]]) -> None:
    """A final response never changes."""
    store, plain, now_s = ResponseStore(LIMIT, LIMIT_BYTES, LIMIT_S), PlainStore(), 0.0
    final: dict[str, StoredLookup] = {}
    for request, step_s in history:
        now_s += step_s
        reply = store.handle(request, now_s)
        assert reply == plain.handle(request, now_s)
        assert len(store) <= LIMIT and store.size_bytes <= LIMIT_BYTES
        if isinstance(reply, StoredLookup) and not isinstance(request, Delete):
            known = final.get(request.id, reply)  # type: ignore[union-attr]
            assert known == reply
            if reply.status is not StoredStatus.RUNNING:
                final[request.id] = reply  # type: ignore[union-attr]
        if reply is True or isinstance(request, Delete):
            final.pop(getattr(request, "id", ""), None)


def running(store: ResponseStore, id: str = "a", runner: str = "one") -> None:
    """Begins a response in its last attempt."""
    begin = Begin(id, kept(10), runner, JOB, MAX_LOST_RUNNERS - 1)
    assert store.handle(begin, 0.0) is True


def fate(store: ResponseStore, now_s: float, id: str = "a") -> StoredStatus:
    found = store.handle(Read(id), now_s)
    assert isinstance(found, StoredLookup)
    return found.status


def pass_by(store: ResponseStore, from_s: float, until_s: float) -> float:
    """Passes time while another ingress sends heartbeats and takes over nothing."""
    now_s = from_s
    while now_s < until_s:
        now_s = min(until_s, now_s + 1)
        store.handle(Heartbeat("idle", []), now_s)
    return now_s


def test_a_response_that_its_runner_reports_is_not_lost() -> None:
    store = ResponseStore(LIMIT, LIMIT_BYTES, LIMIT_S)
    running(store)
    for heartbeat in range(1, 10):
        pass_by(store, (heartbeat - 1) * LEASE_S, heartbeat * LEASE_S - 1)
        assert store.handle(Heartbeat("one", ["a"]), heartbeat * LEASE_S) == HeartbeatReply([], [])
    now_s = pass_by(store, 9 * LEASE_S, 10 * LEASE_S)
    assert fate(store, now_s) is StoredStatus.RUNNING
    now_s += 1
    assert fate(store, now_s) is StoredStatus.LOST
    assert store.handle(Heartbeat("one", ["a"]), now_s) == HeartbeatReply(["a"], [])
    assert store.handle(Store("a", kept(20)), now_s) is False
    assert fate(store, now_s) is StoredStatus.LOST


def test_a_store_that_was_suspended_declares_nothing_lost() -> None:
    """When the store resumes, any request may come first: the runners' heartbeats are still
    queued."""
    store = ResponseStore(LIMIT, LIMIT_BYTES, LIMIT_S)
    running(store)
    assert fate(store, 100 * LEASE_S) is StoredStatus.RUNNING
    assert store.handle(Heartbeat("one", ["a"]), 100 * LEASE_S) == HeartbeatReply([], [])


JOB = Job(b"j" * 10, [(b"n", b"v")])


def test_responses_of_a_lost_runner_are_taken_over_once() -> None:
    store = ResponseStore(LIMIT, LIMIT_BYTES, LIMIT_S)
    assert store.handle(Begin("a", kept(10), "one", JOB), 0.0) is True
    now_s = pass_by(store, 0.0, LEASE_S + 1)
    assert fate(store, now_s) is StoredStatus.RUNNING
    assert store.handle(Heartbeat("two", [], takes=0), now_s) == HeartbeatReply([], [], [])
    taken = Begin("a", kept(10), "two", JOB, lost_runners=1)
    assert store.handle(Heartbeat("two", [], takes=1), now_s) == HeartbeatReply([], [], [taken])
    assert store.handle(Heartbeat("three", [], takes=1), now_s) == HeartbeatReply([], [], [])
    # The first runner was only suspended. It continues, is told to stop, and cannot store a result.
    assert store.handle(Store("a", kept(20), "one"), now_s) is False
    assert store.handle(Heartbeat("one", ["a"], takes=1), now_s) == HeartbeatReply(["a"], [], [])
    assert store.handle(Store("a", kept(20), "two"), now_s) is True
    assert store.handle(Store("a", kept(30), "one"), now_s) is False
    found = store.handle(Read("a"), now_s)
    assert found == StoredLookup(kept(20), StoredStatus.DONE)


def test_a_runner_that_reports_again_before_a_takeover_keeps_its_response() -> None:
    store = ResponseStore(LIMIT, LIMIT_BYTES, LIMIT_S)
    store.handle(Begin("a", kept(10), "one", JOB), 0.0)
    now_s = pass_by(store, 0.0, LEASE_S + 1)
    assert store.handle(Heartbeat("one", ["a"], takes=1), now_s) == HeartbeatReply([], [], [])
    assert store.handle(Heartbeat("two", [], takes=1), now_s) == HeartbeatReply([], [], [])


def test_a_handed_over_response_is_assigned_at_once_and_counts_no_attempt() -> None:
    store = ResponseStore(LIMIT, LIMIT_BYTES, LIMIT_S)
    store.handle(Begin("a", kept(10), "one", JOB), 0.0)
    for runner, successor in (("one", "two"), ("two", "one")) * MAX_LOST_RUNNERS:
        assert store.handle(RunnerExit(runner), 0.0) is True
        orders = store.handle(Heartbeat(successor, [], takes=9), 0.0)
        assert orders == HeartbeatReply([], [], [Begin("a", kept(10), successor, JOB)])


def test_a_response_that_lost_many_runners_fails() -> None:
    store, now_s = ResponseStore(LIMIT, LIMIT_BYTES, LIMIT_S), 0.0
    store.handle(Begin("a", kept(10), "r0", JOB), now_s)
    for runner in range(1, MAX_LOST_RUNNERS):
        now_s = pass_by(store, now_s, now_s + LEASE_S + 1)
        orders = store.handle(Heartbeat(f"r{runner}", [], takes=1), now_s)
        assert isinstance(orders, HeartbeatReply) and len(orders.taken) == 1
    now_s = pass_by(store, now_s, now_s + LEASE_S + 1)
    assert fate(store, now_s) is StoredStatus.LOST
    assert store.size_bytes == 10, "the data needed to compute it is deleted"


def test_responses_lost_together_with_a_fatal_one_are_computed() -> None:
    """One of these responses crashes every ingress that computes it. A runner gets at most one
    response on its last attempt, so the other one is not lost with it."""
    store, now_s = ResponseStore(9, LIMIT_BYTES, LIMIT_S * 99), 0.0
    for id in ("a", "poison", "b"):
        assert store.handle(Begin(id, kept(2), "r0", JOB), now_s) is True
    for runner in range(1, 9):
        now_s = pass_by(store, now_s, now_s + LEASE_S + 1)
        while fate(store, now_s, "poison") is StoredStatus.RUNNING:
            orders = store.handle(Heartbeat(f"r{runner}", [], takes=8), now_s)
            assert isinstance(orders, HeartbeatReply)
            taken = [begin.id for begin in orders.taken]
            if "poison" in taken or not taken:
                break
            for id in taken:
                assert store.handle(Store(id, kept(2), f"r{runner}"), now_s) is True
    fates = [fate(store, now_s, id) for id in ("a", "poison")]
    assert fates == [StoredStatus.DONE, StoredStatus.LOST]
    orders = store.handle(Heartbeat("last", [], takes=8), now_s)
    assert isinstance(orders, HeartbeatReply) and [begin.id for begin in orders.taken] == ["b"]


def test_a_deleted_response_stays_deleted_when_any_runner_stores_it() -> None:
    """The first runner was suspended, and another one has taken the response over."""
    store = ResponseStore(LIMIT, LIMIT_BYTES, LIMIT_S)
    store.handle(Begin("a", kept(10), "one", JOB), 0.0)
    now_s = pass_by(store, 0.0, LEASE_S + 1)
    store.handle(Heartbeat("two", [], takes=1), now_s)
    assert isinstance(store.handle(Delete("a"), now_s), StoredLookup)
    for runner in ("one", "two", "two"):
        assert store.handle(Store("a", kept(20), runner), now_s) is False
    assert store.handle(Read("a"), now_s) is None


def test_a_response_that_no_runner_takes_over_fails_in_the_end() -> None:
    store = ResponseStore(LIMIT, LIMIT_BYTES, LIMIT_S)
    store.handle(Begin("a", kept(10), "one", JOB), 0.0)
    store.handle(RunnerExit("one"), 0.0)
    assert fate(store, LIMIT_S) is StoredStatus.RUNNING
    assert fate(store, LIMIT_S + 1) is StoredStatus.LOST


def test_the_data_for_a_takeover_counts_as_stored() -> None:
    store = ResponseStore(LIMIT, LIMIT_BYTES, LIMIT_S)
    big = Job(b"j" * LIMIT_BYTES)
    assert store.handle(Begin("a", kept(1), "one", big), 0.0) is False
    assert store.handle(Begin("a", kept(10), "one", JOB), 0.0) is True
    assert store.size_bytes == 10 + JOB.size_bytes == 22
    store.handle(Cancel("a"), 0.0)
    assert store.size_bytes == 10


@pytest.mark.parametrize("ending", [Cancel("a"), Delete("a")])
def test_a_runner_stops_deleted_work_at_its_next_heartbeat(ending: ResponseRequest) -> None:
    store = ResponseStore(LIMIT, LIMIT_BYTES, LIMIT_S)
    running(store)
    running(store, "b")
    assert isinstance(store.handle(ending, 1.0), StoredLookup)
    assert store.handle(Heartbeat("one", ["a", "b"]), 2.0) == HeartbeatReply(["a"], [])
    assert store.handle(Store("a", kept(1)), 3.0) is False


def test_an_empty_store_requests_the_running_responses() -> None:
    store = ResponseStore(LIMIT, LIMIT_BYTES, LIMIT_S)
    assert store.handle(Heartbeat("one", ["a"]), 0.0) == HeartbeatReply([], ["a"])
    running(store)
    assert store.handle(Heartbeat("one", ["a"]), 1.0) == HeartbeatReply([], [])


def test_running_responses_are_not_evicted() -> None:
    store = ResponseStore(2, LIMIT_BYTES, LIMIT_S)
    running(store, "a")
    running(store, "b")
    assert store.handle(Store("c", kept(1)), 1.0) is False
    assert store.handle(Begin("c", kept(1), "one", JOB), 1.0) is False
    assert store.handle(Store("a", kept(LIMIT_BYTES), "one"), 1.0) is False
    assert fate(store, 1.0) is StoredStatus.RUNNING
    assert store.handle(Store("a", kept(5), "one"), 1.0) is True
    assert store.handle(Store("c", kept(1)), 1.0) is True
    assert store.handle(Read("a"), 1.0) is None


def test_a_store_of_size_zero_keeps_nothing() -> None:
    store = ResponseStore(0, LIMIT_BYTES, LIMIT_S)
    assert store.handle(Store("a", kept(1)), 0.0) is False
    assert store.handle(Begin("a", kept(1), "one", JOB), 0.0) is False
    assert store.handle(Read("a"), 0.0) is None


def test_reading_a_response_delays_its_eviction() -> None:
    store = ResponseStore(2, LIMIT_BYTES, LIMIT_S)
    for id in ("a", "b"):
        store.handle(Store(id, kept(1)), 0.0)
    store.handle(Read("a"), 0.0)
    store.handle(Store("c", kept(1)), 0.0)
    assert [store.handle(Read(id), 0.0) is not None for id in "abc"] == [True, False, True]
