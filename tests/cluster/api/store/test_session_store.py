"""No chunk of a session is silently lost, with concurrent ingresses and repeated loss of the
store."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swell.cluster.api.store.session_store import (
    RECOVERY_S,
    REPORT_S,
    WANTED_S,
    BeginChunk,
    CommitChunk,
    CreateSession,
    EndSession,
    PutSessions,
    ReadSession,
    ReportReply,
    ReportSessions,
    Session,
    SessionReply,
    SessionStore,
)
from swell.configs.serve import SessionLimits
from tests.cluster.store_handle import grow_old, old_store

OK, UNKNOWN, RECOVERING, SUPERSEDED, FULL, OWNER_FULL = SessionReply
LIMITS = SessionLimits(sessions=4, sessions_per_key=2, session_bytes=10**6, session_idle_s=60.0)
KEYS = [f"{owner}/{number}" for number in range(6) for owner in ("ann", "bob", "carl")]
INGRESSES = 3
keys, ingresses = st.sampled_from(KEYS), st.integers(0, INGRESSES - 1)


@dataclass
class Chunk:
    """A chunk that was begun."""

    ingress: int
    key: str
    ticket: str
    session: Session
    superseded_in: SessionStore | None = None
    """The store in which another chunk has begun since."""


class SessionsAgainstModel(RuleBasedStateMachine):
    """The reference model: the sessions as last committed, and the copies of each ingress. An
    ingress reports its copies every `REPORT_S` and is never lost."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.store = old_store(LIMITS, self.now_s)
        self.recovering_until_s = self.now_s
        self.committed: dict[str, Session] = {}
        self.copies: list[dict[str, Session]] = [{} for _ in range(INGRESSES)]
        self.open: list[Chunk] = []
        self.ended: set[str] = set()
        self.tickets = 0

    @property
    def is_recovering(self) -> bool:
        return self.now_s < self.recovering_until_s

    @rule(key=keys, ingress=ingresses)
    def create(self, key: str, ingress: int) -> None:
        if key in self.committed or key in self.ended:
            return
        owner = key.partition("/")[0]
        reply = self.store.handle(CreateSession(key, Session(1)), self.now_s)
        if not self.is_recovering:  # a recovering store may lack some sessions
            others = [one for one in self.committed if one.startswith(f"{owner}/")]
            is_full = len(self.committed) >= LIMITS.sessions
            assert reply is (FULL if is_full else OWNER_FULL if len(others) >= 2 else OK)
        if reply is OK:
            self.committed[key] = self.copies[ingress][key] = Session(1)

    @rule(data=st.data(), ingress=ingresses)
    def begin(self, data: st.DataObject, ingress: int) -> None:
        """Draws mostly the first session, so that several of its chunks are open at once."""
        key = data.draw(st.sampled_from([*self.committed][:1] * 20 + KEYS))
        self.tickets += 1
        found = self.store.handle(ReadSession(key), self.now_s)
        if not self._is_right(key, found):
            return
        assert isinstance(found, Session)
        older = BeginChunk(key, "older", found.revision - 1)
        assert self.store.handle(older, self.now_s) == found, "and nothing has begun"
        begin = BeginChunk(key, str(self.tickets), found.revision)
        assert self.store.handle(begin, self.now_s) is OK
        for chunk in self.open:
            if chunk.key == key:
                chunk.superseded_in = self.store
        self.open.append(Chunk(ingress, key, str(self.tickets), found))
        self.copies[ingress][key] = found

    @rule(key=keys)
    def read(self, key: str) -> None:
        self._is_right(key, self.store.handle(ReadSession(key), self.now_s))

    def _is_right(self, key: str, found: object) -> bool:
        """Returns whether the session exists. Checks that it was found as last committed."""
        known = self.committed.get(key)
        if found is RECOVERING:
            assert self.is_recovering
            return False
        assert found == (UNKNOWN if known is None else known)
        return known is not None

    @precondition(lambda self: self.open)
    @rule(data=st.data(), rank=st.integers(0, 3))
    def commit(self, data: st.DataObject, rank: int) -> None:
        chunk = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        before = chunk.session
        tokens = before.tokens + chunk.ticket.encode().ljust(4)
        ends = [*before.ends, len(tokens) // 4]
        session = Session(1, tokens, ends, before.revision + 1, rank, chunk.ticket)
        reply = self.store.handle(CommitChunk(chunk.key, chunk.ticket, session), self.now_s)
        known = self.committed.get(chunk.key)
        if reply is OK:
            again = CommitChunk(chunk.key, chunk.ticket, session)
            assert self.store.handle(again, self.now_s) is OK, "its answer was lost"
            assert known == before, "it follows what there is"
            assert chunk.superseded_in is not self.store
            self.committed[chunk.key] = self.copies[chunk.ingress][chunk.key] = session
        elif reply is SUPERSEDED:
            assert chunk.superseded_in is self.store or known != before
        elif reply is RECOVERING:
            assert self.is_recovering
            self.open.append(chunk)  # the ingress retries it
        else:
            assert reply is UNKNOWN and known is None

    @precondition(lambda self: len(self.open) > 2)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))

    @precondition(lambda self: not self.is_recovering and len(self.committed) > 2)
    @rule(key=keys)
    def end(self, key: str) -> None:
        """Runs only on a store that is not recovering: an ingress could put its copy back, which
        would stay until it is idle."""
        if self._is_right(key, self.store.handle(EndSession(key), self.now_s)):
            del self.committed[key]
            self.ended.add(key)
            self.open = [chunk for chunk in self.open if chunk.key != key]

    @rule(ingress=ingresses)
    def report(self, ingress: int) -> None:
        copies = self.copies[ingress]
        revisions = [session.revision for session in copies.values()]
        answering = [chunk.key for chunk in self.open if chunk.ingress == ingress]
        report = ReportSessions([*copies], revisions, answering)
        reply = self.store.handle(report, self.now_s)
        assert isinstance(reply, ReportReply)
        put = PutSessions(reply.wanted, [copies[key] for key in reply.wanted])
        assert self.store.handle(put, self.now_s) is OK
        for key in reply.dropped:
            assert self.committed.get(key) != copies[key], "the only copy"
            del copies[key]

    @rule(reports=st.integers(1, 4))
    def wait(self, reports: int) -> None:
        for _ in range(reports):
            self.now_s += REPORT_S * 0.9
            for ingress in range(INGRESSES):
                self.report(ingress)
            for key in self.committed:  # their clients continue
                self.store.handle(ReportSessions([], [], [key]), self.now_s)

    @precondition(lambda self: self.is_recovering)
    @rule(for_s=st.sampled_from([REPORT_S / 2, RECOVERY_S, 3 * RECOVERY_S]))
    def stand_still(self, for_s: float) -> None:
        """Suspends the store process. Reports that arrived meanwhile are queued after another
        request."""
        self.now_s += for_s
        self.recovering_until_s += for_s - min(for_s, REPORT_S)
        self.read(next(iter(self.committed), KEYS[0]))
        for ingress in range(INGRESSES):
            self.report(ingress)

    @precondition(lambda self: not self.is_recovering and self.committed)
    @rule()
    def lose_the_store(self) -> None:
        """Runs only on a store that is not recovering: another ingress may not have put its copies
        back yet. Reports first, so that ingresses drop their copies of ended sessions."""
        for ingress in range(INGRESSES):
            self.report(ingress)
        self.store = SessionStore(LIMITS, self.now_s)
        self.recovering_until_s = self.now_s + RECOVERY_S

    @precondition(lambda self: len(self.committed) == LIMITS.sessions)
    @rule()
    def wait_until_all_have_ended(self) -> None:
        self.wait(4)
        self.open.clear()
        self.now_s += LIMITS.session_idle_s + 1
        for key in KEYS[:2]:
            assert self.store.handle(ReadSession(key), self.now_s) is UNKNOWN
        assert len(self.store) == self.store.size_bytes == 0
        self.ended.update(self.committed)
        self.committed.clear()
        for copies in self.copies:
            copies.clear()

    @invariant()
    def sizes_match_the_kept_sessions(self) -> None:
        entries = [entry for _key, entry in self.store._kept.items()]
        assert self.store.size_bytes == sum(entry.session.size_bytes for entry in entries)
        assert sum(map(self.store._kept.owned, {key.partition("/")[0] for key in KEYS})) == len(
            self.store
        )


SessionsAgainstModel.TestCase.settings = settings(
    max_examples=300, stateful_step_count=50, deadline=None
)
TestSessionsAgainstModel = SessionsAgainstModel.TestCase


def test_a_chunk_beyond_the_size_limit_is_refused_before_it_is_computed() -> None:
    limits = SessionLimits(session_bytes=8)
    store = old_store(limits, 100.0)
    assert store.handle(CreateSession("a", Session(1)), 100.0) is OK
    assert store.handle(BeginChunk("a", "t", 0), 100.0) is OK
    grown = Session(1, bytes(8), [2], 1, 0)
    assert store.handle(CommitChunk("a", "t", grown), 100.0) is OK
    assert store.handle(BeginChunk("a", "t", 1), 100.0) is FULL
    assert store.handle(ReadSession("a"), 100.0) == grown


@pytest.mark.parametrize("order", ["older first", "newer first"])
def test_the_newest_of_two_copies_counts(order: str) -> None:
    older, newer = Session(1, bytes(4), [1], 1, 0), Session(1, bytes(8), [1, 2], 2, 1)
    store = SessionStore(LIMITS, 0.0)
    for copy in (older, newer) if order == "older first" else (newer, older):
        assert store.handle(PutSessions(["a"], [copy]), 0.0) is OK
        assert store.handle(BeginChunk("a", "t", 2), 0.0) is RECOVERING
    grow_old(store, 0.0)
    assert store.handle(ReadSession("a"), RECOVERY_S) == newer


def test_a_chunk_that_began_before_the_last_commit_is_superseded() -> None:
    store, grown = old_store(LIMITS, 0.0), Session(1, bytes(4), [1], 1, 0)
    assert store.handle(CreateSession("a", Session(1)), 0.0) is OK
    for ticket in ("older", "newer"):
        assert store.handle(BeginChunk("a", ticket, 0), 0.0) is OK
    assert store.handle(CommitChunk("a", "older", grown), 0.0) is SUPERSEDED
    assert store.handle(CommitChunk("a", "newer", grown), 0.0) is OK
    assert store.handle(CommitChunk("a", "older", grown), 0.0) is SUPERSEDED


def test_the_next_chunk_restores_chunks_that_a_copy_lacks() -> None:
    """The ingress of the second chunk was lost with the store. The third chunk carries the whole
    session."""
    first, third = Session(1, bytes(4), [1], 1, 0), Session(1, bytes(12), [1, 2, 3], 3, 0)
    store = SessionStore(LIMITS, 0.0)
    assert store.handle(PutSessions(["a"], [first]), 0.0) is OK
    assert store.handle(CommitChunk("a", "t", third), 0.0) is RECOVERING
    grow_old(store, 0.0)
    assert store.handle(CommitChunk("a", "t", third), RECOVERY_S) is OK
    assert store.handle(ReadSession("a"), RECOVERY_S) == third


def test_a_copy_does_not_change_which_chunk_began_last() -> None:
    first, second = Session(1, bytes(4), [1], 1, 0), Session(1, bytes(8), [1, 2], 2, 0)
    store = SessionStore(LIMITS, 0.0)
    assert store.handle(PutSessions(["a"], [Session(1)]), 0.0) is OK
    grow_old(store, 0.0)
    assert store.handle(BeginChunk("a", "t", 0), RECOVERY_S) is OK
    assert store.handle(PutSessions(["a"], [first]), RECOVERY_S) is OK
    assert store.handle(CommitChunk("a", "u", second), RECOVERY_S) is SUPERSEDED


def test_a_copy_does_not_replace_a_committed_session() -> None:
    """An ingress was cut off for longer than the store was recovering. Its copy is dropped, even if
    newer."""
    store = SessionStore(LIMITS, 0.0)
    assert store.handle(PutSessions(["a"], [Session(1)]), 0.0) is OK
    grow_old(store, 0.0)
    committed = Session(1, bytes(4), [1], 1, 0, "t")
    assert store.handle(CommitChunk("a", "t", committed), RECOVERY_S) is OK
    newer = Session(1, bytes(12), [1, 2, 3], 3, 0, "u")
    reply = store.handle(ReportSessions(["a"], [newer.revision]), RECOVERY_S)
    assert reply == ReportReply([], ["a"])
    assert store.handle(PutSessions(["a"], [newer]), RECOVERY_S) is OK
    assert store.handle(ReadSession("a"), RECOVERY_S) == committed


@pytest.mark.parametrize("pause_s", [RECOVERY_S, 100 * RECOVERY_S])
def test_a_store_is_recovering_after_a_pause(pause_s: float) -> None:
    """The reports that ingresses sent during the pause are still queued."""
    store, copy = SessionStore(LIMITS, 0.0), Session(1, bytes(4), [1], 1, 0)
    assert store.handle(ReadSession("a"), pause_s) is RECOVERING
    assert store.handle(ReportSessions(["a"], [1]), pause_s) == ReportReply(["a"], [])
    assert store.handle(PutSessions(["a"], [copy]), pause_s) is OK
    grow_old(store, pause_s)
    assert store.handle(ReadSession("a"), pause_s + RECOVERY_S) == copy


def test_the_store_waits_for_a_requested_copy() -> None:
    """An ingress with many copies may need longer to put them than the store recovers."""
    store, copy = SessionStore(LIMITS, 0.0), Session(1, bytes(4), [1], 1, 0)
    assert store.handle(PutSessions(["b"], [copy]), 0.0) is OK
    newer = ReportSessions(["a", "b"], [1, 2])
    assert store.handle(newer, 0.0) == ReportReply(["a", "b"], [])
    grow_old(store, 0.0)
    for key, reply in {"a": RECOVERING, "b": RECOVERING, "c": UNKNOWN}.items():
        assert store.handle(ReadSession(key), RECOVERY_S) is reply
    assert store.handle(newer, RECOVERY_S) == ReportReply(["a", "b"], []), "the answer was lost"
    assert store.handle(PutSessions(["a"], [copy]), RECOVERY_S) is OK
    assert store.handle(ReadSession("a"), RECOVERY_S) == copy
    now_s = RECOVERY_S
    while now_s < WANTED_S:
        now_s += REPORT_S
        found = store.handle(ReadSession("b"), now_s)
    assert found == copy, "its ingress has died"
