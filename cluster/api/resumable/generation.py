"""An answer that is computed once for all its readers: events are kept, and each reader begins
after the event that it names.

    begin ─► RUNNING ─► DONE       all events are there
                └─────► FAILED     the answer ended with an error, or was aborted
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncGenerator, Mapping

from swell.cluster.api.resumable.event_id import AnswerOrigin, EventId

_WRITE_EVENTS = 256
"""Events that a reader who is behind gets with one write."""


class GenerationState(enum.Enum):
    RUNNING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class EventsDropped(Exception):
    """A reader is behind the events that are kept: its connection is cut, and it may resume."""


class Generation:
    """`owner` and `key` are the caller and its Idempotency-Key, `name` the digest of the whole
    request (`AnswerOrigin`)."""

    def __init__(self, owner: str, key: str, name: str, adapter: str = "") -> None:
        """`adapter`: the digest of its adapter."""
        self.owner = owner
        self.key = key
        self.name = name
        self.adapter = adapter
        self.origin: AnswerOrigin | None = None
        """None: there is nothing of the answer yet."""
        self.headers: Mapping[str, str] = {}
        self.state = GenerationState.RUNNING
        self.error: Exception | None = None
        """Why there is no answer at all."""
        self.readers = 0
        self.size_bytes = 0
        self._events: list[bytes] = []
        """From number `_dropped` on."""
        self._dropped = 0
        self._prefix = ""
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def is_running(self) -> bool:
        return self.state is GenerationState.RUNNING

    @property
    def count(self) -> int:
        """Events so far."""
        return self._dropped + len(self._events)

    def continues(self, event: EventId | None) -> bool:
        """Whether what follows the event is here, or will be; None: the whole answer."""
        if event is None:
            return not self._dropped
        return self.origin == event.origin and event.number >= self._dropped

    # ---------------------------------------------------------------- what computes it

    def begin(self, created: int, version: str, headers: Mapping[str, str]) -> None:
        """There is something of the answer."""
        self.origin = AnswerOrigin(self.name, created, version, self.adapter)
        self._prefix, self.headers = self.origin.event_prefix(), headers
        self._wake()

    def add_events(self, chunk: bytes, *, numbered: bool) -> int:
        """Events, each with an empty line behind it. What ends a failed answer has no number: a
        client continues behind what came before. Comments, which name engines, are left out:
        they would be others if the answer were computed again. Returns the bytes that are kept."""
        before = self.size_bytes
        for event in chunk.split(b"\n\n")[:-1]:
            if event.startswith(b":"):
                continue
            id = b"id: %b%d\n" % (self._prefix.encode(), self.count + 1) if numbered else b""
            self._keep(b"%b%b\n\n" % (id, event))
        self._wake()
        return self.size_bytes - before

    def end_with(self, body: bytes) -> None:
        """The body of an answer that is not streamed."""
        self._keep(body)
        self.end(GenerationState.DONE)

    def end(self, state: GenerationState) -> None:
        self.state = state
        self._wake()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.end(GenerationState.FAILED)

    def drop_half(self) -> int:
        """Drop the older half of its events. Returns their bytes."""
        half = -(-len(self._events) // 2)
        old, self._events = self._events[:half], self._events[half:]
        self._dropped += len(old)
        size_bytes = sum(map(len, old))
        self.size_bytes -= size_bytes
        return size_bytes

    def _keep(self, event: bytes) -> None:
        self._events.append(event)
        self.size_bytes += len(event)

    # ---------------------------------------------------------------- readers

    async def begun(self) -> None:
        """Until there is something of the answer. Raises why there is nothing."""
        while self.origin is None and self.is_running:
            await self._change()
        if self.error is not None:
            raise self.error

    async def reached(self, number: int) -> None:
        """Until so many events are there, or no more will come."""
        while self.count < number and self.is_running:
            await self._change()

    async def whole(self) -> bytes:
        """The body of an answer that is not streamed. Raises why there is none."""
        while self.is_running:
            await self._change()
        if self.error is not None:
            raise self.error
        return b"".join(self._events)

    async def events_after(self, number: int) -> AsyncGenerator[bytes]:
        """Events behind the first `number`, as many together as there are at once. Raises
        EventsDropped."""
        while True:
            if number < self._dropped:
                raise EventsDropped
            at = number - self._dropped
            ready = self._events[at : at + _WRITE_EVENTS]
            if ready:
                number += len(ready)
                yield b"".join(ready)
            elif self.is_running:
                await self._change()
            elif self.error is not None:
                raise self.error
            else:
                return

    async def _change(self) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)

    def _wake(self) -> None:
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
