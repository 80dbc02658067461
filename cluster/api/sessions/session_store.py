"""What is kept of sessions, in one process for all ingresses. Pure: time is an argument.

A session is a list of tokens, and where each chunk with its answer ends. An ingress that answers a
chunk reads the session, takes it with `BeginChunk` under a ticket of its own once the chunk may be
computed, and brings it back with `CommitChunk`, longer by the chunk and its answer:

    ReadSession ─► Session, revision r;  BeginChunk(ticket, r) ─► OK ... answer ...
    CommitChunk(ticket, revision r + 1)

The chunk that began last is the one that counts: what was begun before it, and at an earlier
revision, is SUPERSEDED. So nothing has to be given back, and an ingress that dies holds nothing up.

The ingress that has made a session, or answers its last chunk, keeps a copy. A store that was
started anew is *young*: it knows nothing of what its predecessor had, asks for it in its replies to
`ReportSessions`, and answers YOUNG meanwhile where it knows no session, or only a copy: there may
be a newer one, in another ingress. Its age is the time in which it could have heard of one: a pause
between two requests counts for `REPORT_S` at most, since a process that stands still hears nothing.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict

import msgspec

from swell.configs.secret import HoldsSecrets, SecretText
from swell.configs.sessions import SessionLimits
from swell.coordinator.listening_clock import ListeningClock

SessionKey = SecretText
"""The name of a session: its id, behind a digest of the key that its client has."""
REPORT_S = 2.0
"""How often an ingress that keeps copies reports them."""
YOUNG_S = 3 * REPORT_S
"""Up to this age a store is young."""
WANTED_S = 5 * YOUNG_S
"""Up to this age it waits for copies that it has asked for while it was young."""
TOKEN_BYTES = 4


class Session(msgspec.Struct, frozen=True):
    """One session as it is between two chunks."""

    created: int
    """In seconds since 1970."""
    tokens: bytes = b""
    """All token ids, each of `TOKEN_BYTES` bytes in the order of the machine."""
    ends: list[int] = []
    """How many tokens there are behind each chunk and its answer."""
    revision: int = 0
    """How many chunks were committed, those included that were replaced since."""
    rank: int | None = None
    """The engine that has answered last, and has the KV."""
    ticket: str = ""
    """Of the chunk that was committed last: a commit may come twice."""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def size_bytes(self) -> int:
        return len(self.tokens) + TOKEN_BYTES * len(self.ends)


class CreateSession(HoldsSecrets, frozen=True, tag=True):
    """Answered by `SessionReply`: OK, also the second time, FULL or OWNER_FULL."""

    key: SessionKey
    session: Session


class BeginChunk(HoldsSecrets, frozen=True, tag=True):
    """Answered by OK, UNKNOWN, YOUNG or FULL, and by the session if it has another revision: then
    nothing has begun."""

    key: SessionKey
    ticket: str
    revision: int


class CommitChunk(HoldsSecrets, frozen=True, tag=True):
    """Answered by OK, SUPERSEDED, UNKNOWN or YOUNG."""

    key: SessionKey
    ticket: str
    session: Session
    """At the next revision."""


class ReadSession(HoldsSecrets, frozen=True, tag=True):
    """Answered by the session, or by UNKNOWN or YOUNG."""

    key: SessionKey


class EndSession(HoldsSecrets, frozen=True, tag=True):
    """As `ReadSession`; then there is none."""

    key: SessionKey


class ReportSessions(HoldsSecrets, frozen=True, tag=True):
    """An ingress has these copies. Answered by `ReportReply`."""

    keys: list[SessionKey]
    revisions: list[int]
    """Of each."""
    answering: list[SessionKey] = []
    """Sessions of which it answers a chunk."""


class PutSessions(HoldsSecrets, frozen=True, tag=True):
    """Copies that the store has asked for. Answered by OK."""

    keys: list[SessionKey]
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
    """There is no such session."""
    YOUNG = "young"
    """Ask again: it may still be put."""
    SUPERSEDED = "superseded"
    """Another chunk has begun since, or was committed."""
    FULL = "full"
    OWNER_FULL = "owner_full"


class ReportReply(HoldsSecrets, frozen=True):
    wanted: list[SessionKey]
    """Copies to put."""
    dropped: list[SessionKey]
    """Copies that are of no use: the session has ended, or has gone on elsewhere."""


StoreAnswer = Session | SessionReply | ReportReply


class _Entry(msgspec.Struct):
    session: Session
    used_s: float
    ticket: str = ""
    """Of the chunk that began last; empty: none has, or it was committed."""
    is_copy: bool = False
    """It was put: a chunk that followed may be in another ingress."""


class SessionStore:
    """All sessions of an application. The least recently used come first; a session that was used
    for `session_idle_s` by no client has ended."""

    def __init__(self, limits: SessionLimits, now_s: float) -> None:
        self._limits = limits
        self._clock = ListeningClock(4 * REPORT_S)
        """A pause counts for a quarter of that at most."""
        self._age_s = self._clock.advance(now_s)
        self._wanted: set[str] = set()
        """Copies that were asked for while it was young, and have not come."""
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._per_owner: Counter[str] = Counter()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def handle(self, request: SessionRequest, now_s: float) -> StoreAnswer:
        """One request of an ingress, at a monotonic time."""
        self._grow_older(now_s)
        self._expire(now_s)
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
                    self._drop(key)
                return found
            case ReportSessions():
                for key in request.answering:
                    self._use(key, now_s)
                return self._reply_to_report(request)
            case PutSessions(keys, sessions):
                for key, session in zip(keys, sessions, strict=True):
                    self._put(key, session, now_s)
                return SessionReply.OK

    def _create(self, key: SessionKey, session: Session, now_s: float) -> SessionReply:
        owner = _owner(key)
        if key in self._entries:
            return SessionReply.OK
        if len(self._entries) >= self._limits.sessions:
            return SessionReply.FULL
        if owner and self._per_owner[owner] >= self._limits.sessions_per_key:
            return SessionReply.OWNER_FULL
        self._set(key, _Entry(session, now_s))
        return SessionReply.OK

    def _begin(self, begin: BeginChunk, now_s: float) -> Session | SessionReply:
        found = self._find(begin.key)
        if not isinstance(found, Session) or found.revision != begin.revision:
            return found
        if self.size_bytes >= self._limits.session_bytes:
            return SessionReply.FULL
        self._use(begin.key, now_s)
        self._entries[begin.key].ticket = begin.ticket
        return SessionReply.OK

    def _commit(self, commit: CommitChunk, now_s: float) -> SessionReply:
        entry, session = self._entries.get(commit.key), commit.session
        if self._may_be_put(commit.key):
            return SessionReply.YOUNG
        if entry is None:
            return SessionReply.UNKNOWN
        if entry.session.ticket == commit.ticket:
            return SessionReply.OK
        if entry.ticket not in ("", commit.ticket) or not _follows(session, entry):
            return SessionReply.SUPERSEDED
        self._set(commit.key, _Entry(session, now_s))
        return SessionReply.OK

    def _find(self, key: SessionKey) -> Session | SessionReply:
        if self._may_be_put(key):
            return SessionReply.YOUNG
        entry = self._entries.get(key)
        return SessionReply.UNKNOWN if entry is None else entry.session

    def _reply_to_report(self, report: ReportSessions) -> ReportReply:
        reply = ReportReply([], [])
        for key, revision in zip(report.keys, report.revisions, strict=True):
            entry = self._entries.get(key)
            known = -1 if entry is None else entry.session.revision
            if known < revision and (self._may_be_put(key) if entry is None else entry.is_copy):
                reply.wanted.append(key)
            elif known != revision:
                reply.dropped.append(key)
        if self._age_s < YOUNG_S:
            self._wanted.update(reply.wanted)
        return reply

    def _put(self, key: SessionKey, session: Session, now_s: float) -> None:
        """What was committed here is no copy, and stays."""
        self._wanted.discard(key)
        entry = self._entries.get(key)
        if entry is None:
            self._set(key, _Entry(session, now_s, is_copy=True))
        elif entry.is_copy and entry.session.revision < session.revision:
            self._set(key, _Entry(session, now_s, entry.ticket, is_copy=True))

    def _may_be_put(self, key: SessionKey) -> bool:
        """Whether an ingress may have a session that is not here, or a newer one."""
        entry = self._entries.get(key)
        is_waiting = self._age_s < YOUNG_S or key in self._wanted
        return is_waiting and (entry is None or entry.is_copy)

    def _grow_older(self, now_s: float) -> None:
        self._age_s = self._clock.advance(now_s)
        if self._age_s >= WANTED_S:
            self._wanted.clear()

    # ---------------------------------------------------------------- what is kept

    def _use(self, key: SessionKey, now_s: float) -> None:
        entry = self._entries.get(key)
        if entry is not None:
            entry.used_s = now_s
            self._entries.move_to_end(key)

    def _set(self, key: SessionKey, entry: _Entry) -> None:
        if key in self._entries:
            self._drop(key)
        self._entries[key] = entry
        self._per_owner[_owner(key)] += 1
        self.size_bytes += entry.session.size_bytes

    def _drop(self, key: SessionKey) -> None:
        self.size_bytes -= self._entries.pop(key).session.size_bytes
        owner = _owner(key)
        self._per_owner[owner] -= 1
        if not self._per_owner[owner]:
            del self._per_owner[owner]

    def _expire(self, now_s: float) -> None:
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if now_s - entry.used_s <= self._limits.session_idle_s:
                return
            self._drop(key)


def _follows(session: Session, entry: _Entry) -> bool:
    """Whether a session is the next of what is kept. Behind a copy some may have been lost."""
    behind = session.revision - entry.session.revision
    return behind == 1 or (entry.is_copy and behind > 1)


def _owner(key: SessionKey) -> str:
    return key.rpartition("/")[0]
