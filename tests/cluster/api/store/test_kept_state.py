"""The rules of `docs/design/kept-state.md` hold for everything that is kept for later requests:
responses, sessions, copies of sessions, and resumable answers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.api.bodies.http_errors import HTTPError
from swell.cluster.api.resumable.generation import Generation
from swell.cluster.api.resumable.generation_table import GenerationTable
from swell.cluster.api.store.bounded_table import TableKey, owner_of, table_key
from swell.cluster.api.store.response_store import (
    Begin,
    Heartbeat,
    Job,
    Read,
    ResponseStore,
    Store,
    StoredResponse,
)
from swell.cluster.api.store.session_store import (
    BeginChunk,
    CommitChunk,
    CreateSession,
    ReadSession,
    ReportSessions,
    Session,
    SessionReply,
)
from swell.configs.serve import ResumableLimits, SessionLimits
from tests.cluster.store_handle import old_store

ENTRIES, PER_OWNER, SIZE_BYTES, AGE_S = 4, 2, 300, 60.0
OWNERS = ("", "ann", "bob")
KEYS = [table_key(owner, str(number)) for owner in OWNERS for number in range(3)]


def _response(size_bytes: int) -> StoredResponse:
    return StoredResponse(bytes(size_bytes), b"")


class Responses:
    """Background responses: in use while they run."""

    per_owner, evicts = False, True

    def __init__(self) -> None:
        self.store = ResponseStore(ENTRIES, SIZE_BYTES, AGE_S)

    def add(self, key: TableKey, now_s: float) -> bool:
        return self.store.handle(Begin(key, _response(50), "one", Job(b"")), now_s) is True

    def write(self, key: TableKey, now_s: float, claim: str = "one") -> bool:
        return self.store.handle(Store(key, _response(90), claim), now_s) is True

    def report(self, in_use: list[TableKey], now_s: float) -> None:
        self.store.handle(Heartbeat("one", [*in_use]), now_s)

    def has(self, key: TableKey, now_s: float) -> bool:
        return self.store.handle(Read(key), now_s) is not None

    def sizes(self) -> tuple[int, int]:
        return len(self.store), self.store.size_bytes


class Sessions:
    """Sessions in the store: in use while a chunk is being answered."""

    per_owner, evicts = True, False

    def __init__(self) -> None:
        limits = SessionLimits(
            sessions=ENTRIES, sessions_per_key=PER_OWNER, session_bytes=10**6, session_idle_s=AGE_S
        )
        self.store = old_store(limits, 0.0)

    def add(self, key: TableKey, now_s: float) -> bool:
        created = self.store.handle(CreateSession(key, Session(1)), now_s)
        if created is not SessionReply.OK:
            return False
        begun = self.store.handle(BeginChunk(key, "one", 0), now_s)
        return begun is SessionReply.OK

    def write(self, key: TableKey, now_s: float, claim: str = "one") -> bool:
        session = Session(1, bytes(80), [20], 1, 0, claim)
        return self.store.handle(CommitChunk(key, claim, session), now_s) is SessionReply.OK

    def report(self, in_use: list[TableKey], now_s: float) -> None:
        self.store.handle(ReportSessions([], [], [*in_use]), now_s)

    def has(self, key: TableKey, now_s: float) -> bool:
        return isinstance(self.store.handle(ReadSession(key), now_s), Session)

    def sizes(self) -> tuple[int, int]:
        return len(self.store), 0


class ResumableAnswers:
    """Resumable answers: in use while they run."""

    per_owner, evicts = True, True

    def __init__(self) -> None:
        limits = ResumableLimits(
            resumable_answers=ENTRIES,
            resumable_answers_per_key=PER_OWNER,
            resumable_bytes=SIZE_BYTES,
            resumable_age_s=AGE_S,
        )
        self.table = GenerationTable(limits)

    def add(self, key: TableKey, now_s: float) -> bool:
        try:
            self.table.add(Generation(key, "name"), now_s)
        except HTTPError:
            return False
        return True

    def write(self, key: TableKey, now_s: float, claim: str = "one") -> bool:
        generation = self.table.find(key, now_s)
        assert generation is not None
        generation.end_with(bytes(90))
        self.table.grew(generation)
        self.table.ended(generation, now_s)
        return True

    def report(self, in_use: list[TableKey], now_s: float) -> None:
        self.table.expire(now_s)

    def has(self, key: TableKey, now_s: float) -> bool:
        return self.table.find(key, now_s) is not None

    def sizes(self) -> tuple[int, int]:
        return len(self.table), self.table.size_bytes


KINDS = (Responses, Sessions, ResumableAnswers)
histories = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "write", "write", "wait"]),
        st.sampled_from(KEYS),
        st.integers(1, 40),
    ),
    min_size=10,
    max_size=40,
)


@pytest.mark.parametrize("kind", KINDS)
@given(histories)
@settings(max_examples=60, deadline=None)
def test_entries_in_use_stay_and_a_refusal_drops_nothing(
    kind: type[Responses | Sessions | ResumableAnswers], history: list[tuple[str, str, int]]
) -> None:
    kept, now_s = kind(), 0.0
    in_use: dict[TableKey, None] = {}
    idle_since_s: dict[TableKey, float] = {}
    for what, key, number in history:
        before = {one for one in KEYS if kept.has(one, now_s)}
        if what == "wait":
            for _ in range(number):
                now_s += 2.0
                kept.report([*in_use], now_s)
        elif what == "add" and key not in before:
            stay = set(in_use) if kept.evicts else before
            same = [one for one in stay if owner_of(one) == owner_of(key)]
            own_full = kept.per_owner and owner_of(key) and len(same) >= PER_OWNER
            is_added = kept.add(key, now_s)
            assert is_added == (not own_full and len(stay) < ENTRIES)
            if is_added:
                in_use[key] = None
            else:
                assert before == {one for one in KEYS if kept.has(one, now_s)}
        elif what == "write" and key in in_use:
            assert kept.write(key, now_s)
            del in_use[key]
            idle_since_s[key] = now_s
        found = {one for one in KEYS if kept.has(one, now_s)}
        young = {one for one in found if now_s - idle_since_s.get(one, now_s) <= AGE_S}
        assert found >= set(in_use), "an entry in use was dropped"
        assert found <= set(in_use) | young, "an idle entry is too old"
        if not kept.evicts:
            assert found >= {one for one, at_s in idle_since_s.items() if now_s - at_s <= AGE_S}
        entries, size_bytes = kept.sizes()
        assert entries == len(found) <= ENTRIES and size_bytes <= SIZE_BYTES
        for owner in OWNERS[1:]:
            own = [one for one in found if owner_of(one) == owner]
            assert not kept.per_owner or len(own) <= PER_OWNER


@pytest.mark.parametrize("kind", KINDS)
def test_another_owner_does_not_find_an_entry(
    kind: type[Responses | Sessions | ResumableAnswers],
) -> None:
    kept = kind()
    assert kept.add(table_key("ann", "0"), 0.0)
    assert [one for one in KEYS if kept.has(one, 0.0)] == [table_key("ann", "0")]


@pytest.mark.parametrize("kind", [Responses, Sessions])
def test_only_the_last_claim_may_write_and_a_repeated_write_has_the_same_reply(
    kind: type[Responses | Sessions],
) -> None:
    kept, key = kind(), KEYS[0]
    assert kept.add(key, 0.0)
    for _ in range(2):
        assert not kept.write(key, 0.0, "two"), "another one has claimed it"
    for _ in range(2):
        assert kept.write(key, 0.0, "one")
