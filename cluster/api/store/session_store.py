"""Keeps the sessions of all ingresses in one process. Pure: time is an argument.

A session is a list of tokens, with the end of each chunk and its answer. An ingress that answers a
chunk reads the session, begins the chunk with `BeginChunk` and a ticket of its own once the chunk
may be computed, and returns the session with `CommitChunk`, extended by the chunk and its answer:

    ReadSession ─► Session, revision r;  BeginChunk(ticket, r) ─► OK ... answer ...
    CommitChunk(ticket, revision r + 1)

The chunk that began last wins: chunks that began before it, or at an earlier revision, are
SUPERSEDED. Therefore no chunk has to be released, and an ingress that dies blocks nothing.

The ingress that created a session, or answered its last chunk, keeps a copy. A restarted store is
*recovering*: it has lost the sessions of its predecessor, and requests them in its replies to
`ReportSessions`. Until then it answers RECOVERING if it does not know a session, or only has a
copy: another ingress may have a newer one. The age of the store is the time in which it could
receive reports: a pause between two requests counts for at most `REPORT_S`, since a suspended
process receives nothing.
"""

from __future__ import annotations

import enum

import msgspec

from swell.cluster.api.store.bounded_table import BoundedTable, TableKey, TableLimits, owner_of
from swell.configs.runtime.secret import HoldsSecrets
from swell.configs.serve import SessionLimits
from swell.coordinator.transport.listening_clock import ListeningClock

REPORT_S = 2.0
"""The interval at which an ingress reports its copies."""
RECOVERY_S = 3 * REPORT_S
"""A store is recovering up to this age."""
WANTED_S = 5 * RECOVERY_S
"""A store waits up to this age for copies that it requested while it was recovering."""
TOKEN_BYTES = 4


class Session(msgspec.Struct, frozen=True):
    """A session between two chunks."""

    created: int
    """In seconds since 1970."""
    tokens: bytes = b""
    """All token ids, each of `TOKEN_BYTES` bytes in native byte order."""
    ends: list[int] = []
    """The number of tokens up to the end of each chunk's answer."""
    revision: int = 0
    """The number of committed chunks, including those that were replaced later."""
    rank: int | None = None
    """The engine that answered last, and has the KV cache of the session."""
    ticket: str = ""
    """The ticket of the chunk that was committed last, which makes a repeated commit harmless."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def size_bytes(self) -> int:
        return len(self.tokens) + TOKEN_BYTES * len(self.ends)


class CreateSession(HoldsSecrets, frozen=True, tag=True):
    """Creates a session. The reply is OK, also the second time, FULL or OWNER_FULL."""

    key: TableKey
    session: Session


class BeginChunk(HoldsSecrets, frozen=True, tag=True):
    """Begins a chunk. The reply is OK, UNKNOWN, RECOVERING or FULL. If the session has another
    revision, the reply is the session, and nothing has begun."""

    key: TableKey
    ticket: str
    revision: int


class CommitChunk(HoldsSecrets, frozen=True, tag=True):
    """Commits a chunk. The reply is OK, SUPERSEDED, UNKNOWN or RECOVERING."""

    key: TableKey
    ticket: str
    session: Session
    """The session at its next revision."""


class ReadSession(HoldsSecrets, frozen=True, tag=True):
    """Reads a session. The reply is the session, UNKNOWN or RECOVERING."""

    key: TableKey


class EndSession(HoldsSecrets, frozen=True, tag=True):
    """Ends a session. The reply is that of `ReadSession`."""

    key: TableKey


class ReportSessions(HoldsSecrets, frozen=True, tag=True):
    """Reports the copies of an ingress. The reply is a `ReportReply`."""

    keys: list[TableKey]
    revisions: list[int]
    """The revision of each copy."""
    answering: list[TableKey] = []
    """Sessions whose chunk the ingress is answering."""


class PutSessions(HoldsSecrets, frozen=True, tag=True):
    """Sends copies that the store has requested. The reply is OK."""

    keys: list[TableKey]
    sessions: list[Session]


SessionRequest = (
    CreateSession
    | BeginChunk
    | CommitChunk
    | ReadSession
    | EndSession
    | ReportSessions
    | PutSessions
)


class SessionReply(enum.StrEnum):
    OK = "ok"
    UNKNOWN = "unknown"
    """The session does not exist."""
    RECOVERING = "recovering"
    """The session may still be restored from a copy: try again."""
    SUPERSEDED = "superseded"
    """Another chunk has begun since, or was committed."""
    FULL = "full"
    OWNER_FULL = "owner_full"


class ReportReply(HoldsSecrets, frozen=True):
    wanted: list[TableKey]
    """Copies to send with `PutSessions`."""
    dropped: list[TableKey]
    """Copies to drop: the session has ended, or another ingress has a newer revision."""


SessionAnswer = Session | SessionReply | ReportReply


class _Entry(msgspec.Struct):
    session: Session
    ticket: str = ""
    """The ticket of the chunk that began last; empty: none has begun, or it was committed."""
    is_copy: bool = False
    """Whether the session was restored from a copy. If so, another ingress may have a newer
    revision."""
    in_use: bool = False

    @property
    def size_bytes(self) -> int:
        return self.session.size_bytes


class SessionStore:
    """All sessions of an application. A session that no client has used for `session_idle_s` is
    dropped. No session is dropped to make room: its client expects it for that time."""

    def __init__(self, limits: SessionLimits, now_s: float) -> None:
        self._limits = limits
        self._clock = ListeningClock(4 * REPORT_S)
        """Measures the age. A pause counts for at most a quarter of the argument."""
        self._age_s = self._clock.advance(now_s)
        self._wanted: set[str] = set()
        """Copies that were requested while the store was recovering and have not arrived."""
        self._kept = BoundedTable[_Entry](TableLimits(age_s=limits.session_idle_s))

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def size_bytes(self) -> int:
        return self._kept.size_bytes

    def handle(self, request: SessionRequest, now_s: float) -> SessionAnswer:
        """Handles one request of an ingress, at a monotonic time."""
        self._grow_older(now_s)
        self._kept.expire(now_s)
        match request:
            case CreateSession(key, session):
                return self._create(key, session, now_s)
            case BeginChunk():
                return self._begin(request, now_s)
            case CommitChunk():
                return self._commit(request, now_s)
            case ReadSession(key):
                return self._find(key)
            case EndSession(key):
                found = self._find(key)
                if isinstance(found, Session):
                    self._kept.remove(key)
                return found
            case ReportSessions():
                for key in request.answering:
                    if key in self._kept:
                        self._kept.renew(key, now_s)
                return self._reply_to_report(request)
            case PutSessions(keys, sessions):
                for key, session in zip(keys, sessions, strict=True):
                    self._restore(key, session, now_s)
                return SessionReply.OK

    def _create(self, key: TableKey, session: Session, now_s: float) -> SessionReply:
        owner = owner_of(key)
        if key in self._kept:
            return SessionReply.OK
        if len(self._kept) >= self._limits.sessions:
            return SessionReply.FULL
        if owner and self._kept.owned(owner) >= self._limits.sessions_per_key:
            return SessionReply.OWNER_FULL
        self._kept.put(key, _Entry(session), now_s)
        return SessionReply.OK

    def _begin(self, begin: BeginChunk, now_s: float) -> Session | SessionReply:
        found, entry = self._find(begin.key), self._kept.get(begin.key)
        if entry is None or not isinstance(found, Session) or found.revision != begin.revision:
            return found
        if self.size_bytes >= self._limits.session_bytes:
            return SessionReply.FULL
        self._kept.renew(begin.key, now_s)
        entry.ticket = begin.ticket
        return SessionReply.OK

    def _commit(self, commit: CommitChunk, now_s: float) -> SessionReply:
        entry, session = self._kept.get(commit.key), commit.session
        if self._may_be_put(commit.key):
            return SessionReply.RECOVERING
        if entry is None:
            return SessionReply.UNKNOWN
        if entry.session.ticket == commit.ticket:
            return SessionReply.OK
        if entry.ticket not in ("", commit.ticket) or not _follows(session, entry):
            return SessionReply.SUPERSEDED
        self._kept.put(commit.key, _Entry(session), now_s)
        return SessionReply.OK

    def _find(self, key: TableKey) -> Session | SessionReply:
        if self._may_be_put(key):
            return SessionReply.RECOVERING
        entry = self._kept.get(key)
        return SessionReply.UNKNOWN if entry is None else entry.session

    def _reply_to_report(self, report: ReportSessions) -> ReportReply:
        reply = ReportReply([], [])
        for key, revision in zip(report.keys, report.revisions, strict=True):
            entry = self._kept.get(key)
            known = -1 if entry is None else entry.session.revision
            if known < revision and (self._may_be_put(key) if entry is None else entry.is_copy):
                reply.wanted.append(key)
            elif known != revision:
                reply.dropped.append(key)
        if self._age_s < RECOVERY_S:
            self._wanted.update(reply.wanted)
        return reply

    def _restore(self, key: TableKey, session: Session, now_s: float) -> None:
        """Restores a session from a copy. A session that was committed here is newer, and stays."""
        self._wanted.discard(key)
        entry = self._kept.get(key)
        if entry is None:
            self._kept.put(key, _Entry(session, is_copy=True), now_s)
        elif entry.is_copy and entry.session.revision < session.revision:
            self._kept.put(key, _Entry(session, entry.ticket, is_copy=True), now_s)

    def _may_be_put(self, key: TableKey) -> bool:
        """Returns whether an ingress may have a session that is missing here, or a newer revision
        of it."""
        entry = self._kept.get(key)
        is_waiting = self._age_s < RECOVERY_S or key in self._wanted
        return is_waiting and (entry is None or entry.is_copy)

    def _grow_older(self, now_s: float) -> None:
        self._age_s = self._clock.advance(now_s)
        if self._age_s >= WANTED_S:
            self._wanted.clear()


def _follows(session: Session, entry: _Entry) -> bool:
    """Returns whether `session` is the next revision of the kept one. After a copy, revisions may
    be missing."""
    behind = session.revision - entry.session.revision
    return behind == 1 or (entry.is_copy and behind > 1)
