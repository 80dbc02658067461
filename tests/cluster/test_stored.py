"""The store of responses answers as a plain list does that is searched anew for every wish."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.stored import (
    LEASE_S,
    Beat,
    Begin,
    Cancel,
    Delete,
    Fate,
    Found,
    Kept,
    Orders,
    Read,
    Store,
    StoredResponses,
    StoreReply,
    StoreWish,
)

LIMIT, LIMIT_BYTES, LIMIT_S = 4, 100, 60.0
IDS = ["a", "b", "c", "d", "e", "f"]
RUNNERS = ["one", "two"]


@dataclass
class Row:
    id: str
    kept: Kept
    fate: Fate
    stored_s: float
    runner: str = ""
    heard_s: float = 0.0
    deleted: bool = False


class PlainStore:
    """The rules once more: a list, least recently used first, in which nothing is counted."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def handle(self, wish: StoreWish, now_s: float) -> StoreReply:
        for row in list(self.rows):
            if row.fate is Fate.RUNNING and now_s - row.heard_s > LEASE_S and not row.deleted:
                self.end(row, Fate.LOST, now_s)
        self.rows = [row for row in self.rows if not self.is_over(row, now_s)]
        match wish:
            case Store(id, kept):
                return self.store(Row(id, kept, Fate.DONE, now_s))
            case Begin(id, kept, runner):
                row = Row(id, kept, Fate.RUNNING, now_s, runner, now_s)
                return self.named(id) is None and self.put(row)
            case Beat(runner, ids):
                return self.beat(runner, ids, now_s)
            case Read(id):
                return self.found(id)
            case Cancel(id):
                row = self.named(id)
                if row is not None and not row.deleted and row.fate is Fate.RUNNING:
                    self.end(row, Fate.CANCELLED, now_s)
                return self.found(id)
            case Delete(id):
                found = self.found(id)
                row = self.named(id)
                if row is not None and not row.deleted:
                    row.deleted = True
                    row.heard_s = now_s
                    if row.fate is not Fate.RUNNING:
                        self.rows.remove(row)
                return found

    def end(self, row: Row, fate: Fate, now_s: float) -> None:
        """What ends was used just now."""
        row.fate, row.stored_s = fate, now_s
        self.rows.remove(row)
        self.rows.append(row)

    def is_over(self, row: Row, now_s: float) -> bool:
        if row.deleted:
            return now_s - row.heard_s > LEASE_S
        return row.fate is not Fate.RUNNING and now_s - row.stored_s > LIMIT_S

    def named(self, id: str) -> Row | None:
        return next((row for row in self.rows if row.id == id), None)

    def found(self, id: str) -> Found | None:
        row = self.named(id)
        if row is None or row.deleted:
            return None
        if row.fate is not Fate.RUNNING:
            self.rows.remove(row)
            self.rows.append(row)
        return Found(row.kept, row.fate)

    def store(self, row: Row) -> bool:
        before = self.named(row.id)
        if before is None:
            return self.put(row)
        if before.deleted:
            self.rows.remove(before)
        if before.deleted or before.fate is not Fate.RUNNING:
            return False
        place = self.rows.index(before)
        self.rows.remove(before)
        done = self.put(row)
        if not done:
            self.rows.insert(place, before)
        return done

    def put(self, row: Row) -> bool:
        def fits(rows: list[Row]) -> bool:
            sizes = [one.kept.size_bytes for one in rows if not one.deleted]
            return len(sizes) < LIMIT and sum(sizes) + row.kept.size_bytes <= LIMIT_BYTES

        if not fits([one for one in self.rows if one.fate is Fate.RUNNING]):
            return False
        while not fits(self.rows):
            self.rows.remove(
                next(o for o in self.rows if o.fate is not Fate.RUNNING and not o.deleted)
            )
        self.rows.append(row)
        return True

    def beat(self, runner: str, ids: list[str], now_s: float) -> Orders:
        orders = Orders([], [])
        for id in ids:
            row = self.named(id)
            if row is None:
                orders.unknown.append(id)
                continue
            if row.deleted:
                row.heard_s = now_s
            if row.deleted or row.fate is not Fate.RUNNING or row.runner != runner:
                orders.stop.append(id)
            else:
                row.heard_s = now_s
        return orders


def kept(size: int, background: bool = False) -> Kept:
    return Kept(b"x" * (size // 2), b"y" * (size - size // 2), background)


ids = st.sampled_from(IDS)
bodies = st.builds(kept, st.integers(0, 60))
wishes = st.one_of(
    st.builds(Store, ids, bodies),
    st.builds(Begin, ids, bodies, st.sampled_from(RUNNERS)),
    st.builds(Beat, st.sampled_from(RUNNERS), st.lists(ids, max_size=4, unique=True)),
    st.builds(Read, ids),
    st.builds(Cancel, ids),
    st.builds(Delete, ids),
)
steps = st.sampled_from([0.0, 1.0, 2.0, LEASE_S, LEASE_S + 1, LIMIT_S + 1])


@given(st.lists(st.tuples(wishes, steps), max_size=60))
@settings(max_examples=300, deadline=None)
def test_it_answers_as_a_plain_list(story: list[tuple[StoreWish, float]]) -> None:
    """And what was told as final stays as it was told."""
    store, plain, now_s = StoredResponses(LIMIT, LIMIT_BYTES, LIMIT_S), PlainStore(), 0.0
    final: dict[str, Found] = {}
    for wish, step_s in story:
        now_s += step_s
        reply = store.handle(wish, now_s)
        assert reply == plain.handle(wish, now_s)
        assert len(store) <= LIMIT and store.size_bytes <= LIMIT_BYTES
        if isinstance(reply, Found) and not isinstance(wish, Delete):
            told = final.get(wish.id, reply)  # type: ignore[union-attr]
            assert told == reply
            if reply.fate is not Fate.RUNNING:
                final[wish.id] = reply  # type: ignore[union-attr]
        if reply is True or isinstance(wish, Delete):
            final.pop(wish.id, None)  # type: ignore[union-attr]


def running(store: StoredResponses, id: str = "a", runner: str = "one") -> None:
    assert store.handle(Begin(id, kept(10, True), runner), 0.0) is True


def fate(store: StoredResponses, now_s: float, id: str = "a") -> Fate:
    found = store.handle(Read(id), now_s)
    assert isinstance(found, Found)
    return found.fate


def test_what_its_runner_speaks_of_is_not_lost() -> None:
    store = StoredResponses(LIMIT, LIMIT_BYTES, LIMIT_S)
    running(store)
    for beat in range(1, 10):
        assert store.handle(Beat("one", ["a"]), beat * LEASE_S) == Orders([], [])
    assert fate(store, 10 * LEASE_S) is Fate.RUNNING
    assert fate(store, 10 * LEASE_S + 1) is Fate.LOST
    assert store.handle(Beat("one", ["a"]), 10 * LEASE_S + 1) == Orders(["a"], [])
    assert store.handle(Store("a", kept(20, True)), 10 * LEASE_S + 1) is False
    assert fate(store, 10 * LEASE_S + 1) is Fate.LOST


@pytest.mark.parametrize("wish", [Cancel("a"), Delete("a")])
def test_who_computes_hears_at_the_next_beat_that_nobody_wants_it(wish: StoreWish) -> None:
    store = StoredResponses(LIMIT, LIMIT_BYTES, LIMIT_S)
    running(store)
    running(store, "b")
    assert isinstance(store.handle(wish, 1.0), Found)
    assert store.handle(Beat("one", ["a", "b"]), 2.0) == Orders(["a"], [])
    assert store.handle(Store("a", kept(1)), 3.0) is False


def test_a_store_that_knows_nothing_asks_for_what_runs() -> None:
    store = StoredResponses(LIMIT, LIMIT_BYTES, LIMIT_S)
    assert store.handle(Beat("one", ["a"]), 0.0) == Orders([], ["a"])
    running(store)
    assert store.handle(Beat("one", ["a"]), 1.0) == Orders([], [])


def test_what_runs_makes_no_room_for_anybody() -> None:
    store = StoredResponses(2, LIMIT_BYTES, LIMIT_S)
    running(store, "a")
    running(store, "b")
    assert store.handle(Store("c", kept(1)), 1.0) is False
    assert store.handle(Begin("c", kept(1), "one"), 1.0) is False
    assert store.handle(Store("a", kept(LIMIT_BYTES)), 1.0) is False
    assert fate(store, 1.0) is Fate.RUNNING
    assert store.handle(Store("a", kept(5)), 1.0) is True
    assert store.handle(Store("c", kept(1)), 1.0) is True
    assert store.handle(Read("a"), 1.0) is None


def test_nothing_is_kept_where_nothing_may_be() -> None:
    store = StoredResponses(0, LIMIT_BYTES, LIMIT_S)
    assert store.handle(Store("a", kept(1)), 0.0) is False
    assert store.handle(Begin("a", kept(1), "one"), 0.0) is False
    assert store.handle(Read("a"), 0.0) is None


def test_reading_is_use() -> None:
    store = StoredResponses(2, LIMIT_BYTES, LIMIT_S)
    for id in ("a", "b"):
        store.handle(Store(id, kept(1)), 0.0)
    store.handle(Read("a"), 0.0)
    store.handle(Store("c", kept(1)), 0.0)
    assert [store.handle(Read(id), 0.0) is not None for id in "abc"] == [True, False, True]
