"""An answer that is computed once for all its readers: its events are kept, and each reader begins
after the event that it names.

    begin ─► RUNNING ─► DONE       all events are there
                └─────► FAILED     the answer ended with an error, or was aborted
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncGenerator, Mapping

from swell.cluster.api.resumable.event_id import AnswerOrigin, EventId
from swell.cluster.api.store.bounded_table import TableKey

_WRITE_EVENTS = 256
"""The most events in one write to a reader that catches up."""


class GenerationState(enum.Enum):
    RUNNING = enum.auto()
    DONE = enum.auto()
    FAILED = enum.auto()


class EventsDropped(Exception):
    """A reader needs events that were dropped: its connection is cut, and it may resume."""


class Generation:
    """One answer. `key` is made of the caller and its Idempotency-Key; `name` is the digest of the
    whole request (`AnswerOrigin`)."""

    def __init__(self, key: TableKey, name: str, adapter: str = "") -> None:
        """`adapter` is the digest of the adapter."""
        self.key = key
        self.name = name
        self.adapter = adapter
        self.origin: AnswerOrigin | None = None
        """None until the first part of the answer exists."""
        self.headers: Mapping[str, str] = {}
        self.state = GenerationState.RUNNING
        self.error: Exception | None = None
        """The reason why no answer exists."""
        self.readers = 0
        self.size_bytes = 0
        self._events: list[bytes] = []
        """The kept events, from number `_dropped` on."""
        self._dropped = 0
        self._prefix = ""
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def is_running(self) -> bool:
        return self.state is GenerationState.RUNNING

    @property
    def in_use(self) -> bool:
        return self.is_running or self.readers > 0

    @property
    def count(self) -> int:
        """The number of events so far."""
        return self._dropped + len(self._events)

    def continues(self, event: EventId | None) -> bool:
        """Returns whether the events after `event` are, or will be, available here; None: the whole
        answer."""
        if event is None:
            return not self._dropped
        return self.origin == event.origin and event.number >= self._dropped

    # ---------------------------------------------------------------- the producer

    def begin(self, created: int, version: str, headers: Mapping[str, str]) -> None:
        """Starts the answer: its first part exists."""
        self.origin = AnswerOrigin(self.name, created, version, self.adapter)
        self._prefix, self.headers = self.origin.event_prefix(), headers
        self._wake()

    def add_events(self, chunk: bytes, *, numbered: bool) -> None:
        """Adds the events of `chunk`, each terminated by an empty line. The events that end a
        failed answer are not numbered: a client continues after the ones before. Comments, which
        name engines, are left out, because they would differ if the answer were computed again."""
        for event in chunk.split(b"\n\n")[:-1]:
            if event.startswith(b":"):
                continue
            id = b"id: %b%d\n" % (self._prefix.encode(), self.count + 1) if numbered else b""
            self._keep(b"%b%b\n\n" % (id, event))
        self._wake()

    def end_with(self, body: bytes) -> None:
        """Stores the body of an answer that is not streamed, and ends the answer."""
        self._keep(body)
        self.end(GenerationState.DONE)

    def end(self, state: GenerationState) -> None:
        self.state = state
        self._wake()

    def fail(self, error: Exception) -> None:
        self.error = error
        self.end(GenerationState.FAILED)

    def drop_half(self) -> None:
        """Drops the older half of the events."""
        half = -(-len(self._events) // 2)
        old, self._events = self._events[:half], self._events[half:]
        self._dropped += len(old)
        self.size_bytes -= sum(map(len, old))

    def _keep(self, event: bytes) -> None:
        self._events.append(event)
        self.size_bytes += len(event)

    # ---------------------------------------------------------------- readers

    def join(self) -> None:
        """Counts one more reader."""
        self.readers += 1

    def leave(self) -> None:
        """Counts one reader less."""
        self.readers -= 1

    async def begun(self) -> None:
        """Waits until the first part of the answer exists. Raises the error if no answer exists."""
        while self.origin is None and self.is_running:
            await self._change()
        if self.error is not None:
            raise self.error

    async def reached(self, number: int) -> None:
        """Waits until `number` events exist, or no more will come."""
        while self.count < number and self.is_running:
            await self._change()

    async def whole(self) -> bytes:
        """Returns the body of an answer that is not streamed. Raises the error if no answer
        exists."""
        while self.is_running:
            await self._change()
        if self.error is not None:
            raise self.error
        return b"".join(self._events)

    async def events_after(self, number: int) -> AsyncGenerator[bytes]:
        """Yields the events after the first `number`; available events are joined into one write.
        Raises EventsDropped."""
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
