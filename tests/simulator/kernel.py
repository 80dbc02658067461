"""The virtual clock and the events of all processes, in one thread: one seed gives one run.

Law: events run by time, and those of one instant in the order in which they were made. No order
comes from addresses or hashes, and no two purposes share a source of chance, so that leaving one
event out moves nothing else.
"""

from __future__ import annotations

import struct
import sys
from asyncio import events
from collections import deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from random import Random
from typing import Any
from zlib import crc32

Call = Callable[..., Any]
Event = tuple["Owner", Call, tuple[Any, ...]]
"""Who runs it, and what."""

_MANY_TRACED = 1000
_pack_time = struct.Struct("<d").pack


class ProcessExited(BaseException):
    """Unwinds an event of a process that has just ended itself."""


class Owner:
    """Who runs an event. As it is: the world itself, which always runs."""

    name = "world"
    runs = True
    """Whether its events run at their time; else `hold` takes them."""
    loop: Any = None
    """Its event loop. The world has none, and leaves that of the process before it, which it does
    not use."""

    def hold(self, call: Call, args: tuple[Any, ...]) -> None:
        """An event came while it does not run."""

    def fail(self, what: str, error: BaseException) -> None:
        """An event has raised."""
        raise error


WORLD = Owner()


class Kernel:
    """All events, by virtual time in seconds."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.events = 0
        """Events that have run."""
        self._checksum = 0
        self._traced: list[bytes] = []
        """What is not in it yet."""
        self.log: list[tuple[float, str, int]] | None = None
        """If it is a list: what was traced, as time, label and bytes of the frame."""
        self.failures: list[str] = []
        """Loops and callbacks that have raised."""
        self._halted = False
        self._number = count().__next__
        self._heap: list[tuple[float, int, Event]] = []
        """Events of later instants."""
        self.ready: deque[Event] = deque()
        """Events of this instant. What comes from the heap is older than what was made since."""

    def random(self, name: str) -> Random:
        """A source of chance of its own."""
        return Random(f"{self.seed}:{name}")

    def at(self, when: float, owner: Owner, call: Call, *args: Any) -> None:
        """Run `call(*args)` at a time, now if it has passed."""
        if when <= self.now:
            self.ready.append((owner, call, args))
        else:
            heappush(self._heap, (when, self._number(), (owner, call, args)))

    def soon(self, owner: Owner, call: Call, *args: Any) -> None:
        self.ready.append((owner, call, args))

    def reschedule(self, owner: Owner, when: Callable[[Call], float | None]) -> None:
        """Move the waiting events of an owner: `when` gives their new times, None to let one be."""
        for index, (_, number, event) in enumerate(self._heap):
            if event[0] is owner and (new := when(event[1])) is not None:
                self._heap[index] = (max(new, self.now), number, event)
        heapify(self._heap)

    def trace(self, label: bytes, frame: bytes = b"") -> None:
        """Make it part of the checksum. Neither may hold addresses, times of the machine or the
        order of a set."""
        traced = self._traced
        traced += (_pack_time(self.now), label, frame)
        if len(traced) > _MANY_TRACED:
            self._add_traced()
        if self.log is not None:
            self.log.append((self.now, label.decode(), len(frame)))

    @property
    def checksum(self) -> int:
        """Of all that was traced: equal for equal runs."""
        self._add_traced()
        return self._checksum

    def _add_traced(self) -> None:
        self._checksum = crc32(b"".join(self._traced), self._checksum)
        self._traced.clear()

    def halt(self) -> None:
        """End `run` after this event."""
        self._halted = True

    def run(self, until_s: float, max_events: int = sys.maxsize) -> bool:
        """Run events up to a time. True if it was halted. Raises RuntimeError if there are more
        events than `max_events`: something turns without end."""
        heap, ready, set_loop = self._heap, self.ready, events._set_running_loop
        next_of, append = ready.popleft, ready.append
        loop, left = None, max_events
        self._halted = False
        try:
            while True:
                while ready:
                    owner, call, args = next_of()
                    if not owner.runs:
                        owner.hold(call, args)
                        continue
                    if owner.loop is not loop and owner.loop is not None:
                        loop = owner.loop
                        set_loop(loop)
                    left -= 1
                    try:
                        call(*args)
                    except ProcessExited:
                        pass
                    except Exception as error:
                        owner.fail(getattr(call, "__qualname__", "event"), error)
                    if self._halted:
                        return True
                    if not left:
                        raise RuntimeError(f"{max_events} events until {self.now:.3f} s")
                if not heap or heap[0][0] > until_s:
                    self.now = max(self.now, until_s)
                    return False
                self.now, _, event = heappop(heap)
                append(event)
                while heap and heap[0][0] <= self.now:
                    append(heappop(heap)[2])
        finally:
            self.events += max_events - left
            set_loop(None)
