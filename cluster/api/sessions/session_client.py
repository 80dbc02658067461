"""The client of one ingress for the sessions in the store, with copies of the sessions that this
ingress has created or answered last."""

from __future__ import annotations

import asyncio
import math
import re
import time
import uuid
from array import array
from collections.abc import Sequence
from typing import Any

from swell.cluster.api.bodies.generation_body import SESSION_PREFIX
from swell.cluster.api.bodies.http_errors import RETRY_AFTER, HTTPError
from swell.cluster.api.store.bounded_table import BoundedTable, TableKey, TableLimits, table_key
from swell.cluster.api.store.session_store import (
    REPORT_S,
    TOKEN_BYTES,
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
    SessionRequest,
)
from swell.cluster.api.store.store_client import ReportLoop, StoreClient
from swell.cluster.text.errors import BadRequest
from swell.configs.error_text import shown
from swell.configs.runtime.secret import SecretText
from swell.configs.serve import SessionLimits

_PATIENCE_S = 30.0
"""How long a request waits for the store: Serve replaces a dead store within seconds."""
_ID = re.compile(f"{SESSION_PREFIX}[0-9a-f]{{32}}")
_MAX_PUT_BYTES = 8 * 1024 * 1024
"""The most bytes of sessions in one message; the first session may be larger."""
_TOKEN_TYPE = next(kind for kind in "IL" if array(kind).itemsize == TOKEN_BYTES)


class _Copy:
    """The newest revision of a session that this ingress has seen."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.chunks = 0
        """The number of its chunks that are being answered."""

    @property
    def size_bytes(self) -> int:
        return self.session.size_bytes

    @property
    def in_use(self) -> bool:
        return self.chunks > 0


class OpenChunk:
    """A chunk that is being answered, with the session as the chunk found it."""

    def __init__(
        self, id: str, key: TableKey, session: Session, chunks: int, until_s: float
    ) -> None:
        """`chunks` is the number of chunks that stay before this one; `until_s` is the deadline of
        the client, on the clock of the event loop."""
        self.id = id
        self.key = key
        self.ticket = uuid.uuid4().hex
        self.session = session
        self.chunks = chunks
        self.num_tokens = session.ends[chunks - 1] if chunks else 0
        self.until_s = until_s
        self._copy: _Copy | None = None
        """The copy of the session, which is in use while the chunk is being answered."""

    def use_copy(self, copy: _Copy) -> None:
        """Keeps the copy of the session until `release_copy`."""
        self._copy = copy

    def release_copy(self) -> _Copy | None:
        """Returns the copy of the session, once."""
        copy, self._copy = self._copy, None
        return copy

    @property
    def is_first(self) -> bool:
        return self.chunks == 0

    @property
    def is_last(self) -> bool:
        """Whether no other chunk stands at its place or after it."""
        return self.chunks == len(self.session.ends)

    @property
    def token_ids(self) -> list[int]:
        """The tokens before the chunk."""
        ids = array(_TOKEN_TYPE)
        ids.frombytes(self.session.tokens[: self.num_tokens * TOKEN_BYTES])
        return ids.tolist()

    def has(self, token_ids: Sequence[int]) -> bool:
        """Returns whether the session already contains the chunk and its answer."""
        packed = array(_TOKEN_TYPE, token_ids).tobytes()
        is_end = not self.is_last and self.session.ends[self.chunks] == len(token_ids)
        return is_end and self.session.tokens.startswith(packed)

    def with_answer(self, token_ids: Sequence[int], rank: int | None) -> Session:
        """Returns the session after the chunk. `token_ids` are all its tokens, with the answer;
        `rank` is the engine that answered."""
        return Session(
            created=self.session.created,
            tokens=array(_TOKEN_TYPE, token_ids).tobytes(),
            ends=[*self.session.ends[: self.chunks], len(token_ids)],
            revision=self.session.revision + 1,
            rank=rank,
            ticket=self.ticket,
        )


class SessionClient:
    """The sessions of one ingress. If the store does not answer, or has not yet received the
    sessions of its predecessor, a call waits for it."""

    def __init__(self, store: Any, limits: SessionLimits) -> None:
        """`store` is the handle of `StoreService`; None: sessions are disabled."""
        self._limits = limits
        self._is_enabled = store is not None and limits.sessions > 0
        self._store = StoreClient(store, "sessions")
        self._copies = BoundedTable[_Copy](
            TableLimits(size_bytes=limits.session_bytes, age_s=limits.session_idle_s)
        )
        self._reports = ReportLoop(self._report)

    def start(self) -> None:
        if self._is_enabled:
            self._reports.start(REPORT_S)

    async def close(self) -> None:
        await self._reports.close()

    async def create(self, owner: SecretText) -> tuple[str, Session]:
        id, session = f"{SESSION_PREFIX}{uuid.uuid4().hex}", Session(int(time.time()))
        key = table_key(owner, id)
        reply = await self._until_answered(CreateSession(key, session))
        if reply is SessionReply.FULL:
            limit = f"serve.sessions={self._limits.sessions}"
            raise _full(503, f"the limit of sessions is reached ({limit})")
        if reply is SessionReply.OWNER_FULL:
            limit = f"serve.sessions_per_key={self._limits.sessions_per_key}"
            raise _full(429, f"the limit of sessions of your key is reached ({limit})")
        self._copy(key, session)
        return id, session

    async def read(self, owner: SecretText, id: str) -> Session:
        return self._found(id, await self._until_answered(ReadSession(self._key(owner, id))))

    async def end(self, owner: SecretText, id: str) -> None:
        key = self._key(owner, id)
        self._copies.remove(key)
        self._found(id, await self._until_answered(ReadSession(key)))
        await self._until_answered(EndSession(key))  # UNKNOWN: ended by a call without a reply

    async def find(
        self, owner: SecretText, id: str, chunk: int | None, until_s: float
    ) -> OpenChunk:
        """Returns the session after its first `chunk` chunks; None: after all of them. Begins
        nothing in the store. `until_s`: the deadline of the client."""
        session = await self.read(owner, id)
        count = len(session.ends)
        if chunk is not None and chunk > count:
            raise HTTPError(
                409,
                f"session_chunk={chunk}, but the session {shown(id)} has {count} chunks; send at "
                f"most {count}, or leave it out",
                "no_such_chunk",
            )
        chunks = count if chunk is None else chunk
        return OpenChunk(id, self._key(owner, id), session, chunks, until_s)

    async def begin(self, chunk: OpenChunk) -> bool:
        """Begins the chunk, which supersedes any other chunk in progress, until `close_chunk`.
        Returns False if the session has changed since it was found."""
        begin = BeginChunk(chunk.key, chunk.ticket, chunk.session.revision)
        reply = await self._until_answered(begin, chunk.until_s)
        if isinstance(reply, Session):
            return False
        if reply is not SessionReply.OK:
            self._found(chunk.id, reply)
        chunk.use_copy(self._copy(chunk.key, chunk.session, new_chunks=1))
        return True

    def close_chunk(self, chunk: OpenChunk) -> None:
        """Ends the work on a chunk."""
        copy = chunk.release_copy()
        if copy is not None:
            copy.chunks -= 1
            if self._copies.get(chunk.key) is copy:
                self._copies.renew(chunk.key, _now_s())

    async def commit(self, chunk: OpenChunk, token_ids: Sequence[int], rank: int | None) -> None:
        """Adds the chunk and its answer to the session. Raises HTTPError if that fails."""
        session = chunk.with_answer(token_ids, rank)
        commit = CommitChunk(chunk.key, chunk.ticket, session)
        reply = await self._until_answered(commit, chunk.until_s)
        if reply is SessionReply.SUPERSEDED:
            raise HTTPError(
                409,
                f"another chunk of the session {shown(chunk.id)} started while this one was being "
                "answered, so this one is not part of the session",
                "chunk_superseded",
            )
        if reply is not SessionReply.OK:
            raise _not_found(chunk.id)
        self._copy(chunk.key, session)

    # ---------------------------------------------------------------- the store

    def _key(self, owner: SecretText, id: str) -> TableKey:
        """Returns the store key of a session. Raises HTTPError 404 for a malformed id, which may be
        very long."""
        if self._is_enabled and not _ID.fullmatch(id):
            raise _not_found(id)
        return table_key(owner, id)

    async def _until_answered(self, request: SessionRequest, until_s: float = math.inf) -> Any:
        if not self._is_enabled:
            raise BadRequest(
                "this server has no sessions (serve.sessions=0)", "session_id", "unsupported_value"
            )
        return await self._store.until_answered(request, min(_now_s() + _PATIENCE_S, until_s))

    def _found(self, id: str, reply: Any) -> Session:
        if reply is SessionReply.FULL:
            limit = f"serve.session_bytes={self._limits.session_bytes}"
            raise _full(503, f"the sessions use all of {limit}")
        if not isinstance(reply, Session):
            raise _not_found(id)
        return reply

    # ---------------------------------------------------------------- copies

    def _copy(self, key: TableKey, session: Session, new_chunks: int = 0) -> _Copy:
        copy = self._copies.get(key) or _Copy(session)
        copy.session = session
        copy.chunks += new_chunks
        self._copies.put(key, copy, _now_s())
        self._copies.trim()
        return copy

    async def _report(self) -> None:
        self._copies.expire(_now_s())  # the store drops these sessions too
        if not len(self._copies):
            return
        sent = {key: copy.session.revision for key, copy in self._copies.items()}
        answering = [key for key, copy in self._copies.items() if copy.in_use]
        report = ReportSessions([*sent], [*sent.values()], answering)
        reply = await self._store.call(report)
        assert isinstance(reply, ReportReply), reply
        for key in reply.dropped:
            copy = self._copies.get(key)
            if copy is not None and copy.session.revision == sent[key]:
                self._copies.remove(key)
        put, size_bytes = PutSessions([], []), 0
        for key in reversed(reply.wanted):  # the most recently used ones first
            copy = self._copies.get(key)
            if copy is None:
                continue
            size_bytes += copy.size_bytes
            if put.keys and size_bytes > _MAX_PUT_BYTES:
                await self._store.call(put)
                put, size_bytes = PutSessions([], []), copy.size_bytes
            put.keys.append(key)
            put.sessions.append(copy.session)
        if put.keys:
            await self._store.call(put)


def _now_s() -> float:
    return asyncio.get_running_loop().time()


def _not_found(id: str) -> HTTPError:
    return HTTPError(
        404,
        f"there is no session {shown(id)}: it was deleted, or received no chunk for "
        "serve.session_idle_s, or was lost with the processes that stored it",
        "session_not_found",
    )


def _full(status: int, problem: str) -> HTTPError:
    return HTTPError(
        status,
        f"{problem}; delete sessions (DELETE /v1/sessions/ID), or try again later",
        "too_many_sessions",
        RETRY_AFTER,
    )
