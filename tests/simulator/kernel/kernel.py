"""Runs the events of all processes by a virtual clock in one thread: a seed determines the whole
run.

Invariant: events run in the order of their times; events of the same instant run in the order in
which they were created. No order depends on memory addresses or hashes. Each purpose has its own
source of random numbers, so removing one event leaves the others unchanged.
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
"""The owner that runs the event, the call, and its arguments."""

_MANY_TRACED = 1000
_pack_time = struct.Struct("<d").pack


class ProcessExited(BaseException):
    """Unwinds the event of a process that has just terminated itself."""


class Owner:
    """The owner of events, usually a process. This base class is the world itself, which always
    runs."""

    name = "world"
    runs = True
    """Whether its events run at their time; if not, `hold` receives them."""
    loop: Any = None
    """The event loop that is set as the running loop during its events. The world has none: its
    events run under the loop of the previous process and do not use it."""

    def hold(self, call: Call, args: tuple[Any, ...]) -> None:
        """Called with an event that is due while the owner does not run."""

    def fail(self, what: str, error: BaseException) -> None:
        """Called when an event has raised an exception."""
        raise error


WORLD = Owner()


class Kernel:
    """Holds all events, by virtual time in seconds."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.events = 0
        """Number of events that have run."""
        self._checksum = 0
        self._traced: list[bytes] = []
        """Traced data that the checksum does not include yet."""
        self.log: list[tuple[float, str, int]] | None = None
        """If it is a list, it collects all traced items as (time, label, number of bytes of the
        frame)."""
        self.failures: list[str] = []
        """Exceptions of loops and callbacks."""
        self._halted = False
        self._number = count().__next__
        self._heap: list[tuple[float, int, Event]] = []
        """Events of later instants."""
        self.ready: deque[Event] = deque()
        """Events of this instant. Events from the heap run before events that were created at this
        instant."""

    def random(self, name: str) -> Random:
        """Returns a source of random numbers for one purpose."""
        return Random(f"{self.seed}:{name}")

    def at(self, when: float, owner: Owner, call: Call, *args: Any) -> None:
        """Runs `call(*args)` at `when`, or at once if that time has passed."""
        if when <= self.now:
            self.ready.append((owner, call, args))
        else:
            heappush(self._heap, (when, self._number(), (owner, call, args)))

    def soon(self, owner: Owner, call: Call, *args: Any) -> None:
        self.ready.append((owner, call, args))

    def reschedule(self, owner: Owner, when: Callable[[Call], float | None]) -> None:
        """Moves the waiting events of an owner. `when` returns the new time of a call, or None to
        leave it unchanged."""
        for index, (_, number, event) in enumerate(self._heap):
            if event[0] is owner and (new := when(event[1])) is not None:
                self._heap[index] = (max(new, self.now), number, event)
        heapify(self._heap)

    def trace(self, label: bytes, frame: bytes = b"") -> None:
        """Adds an item to the checksum. `label` and `frame` must not contain memory addresses,
        times of the machine or the order of a set."""
        traced = self._traced
        traced += (_pack_time(self.now), label, frame)
        if len(traced) > _MANY_TRACED:
            self._add_traced()
        if self.log is not None:
            self.log.append((self.now, label.decode(), len(frame)))

    @property
    def checksum(self) -> int:
        """The checksum of everything traced: equal for equal runs."""
        self._add_traced()
        return self._checksum

    def _add_traced(self) -> None:
        self._checksum = crc32(b"".join(self._traced), self._checksum)
        self._traced.clear()

    def halt(self) -> None:
        """Makes `run` return after this event."""
        self._halted = True

    def run(self, until_s: float, max_events: int = sys.maxsize) -> bool:
        """Runs events until `until_s`. Returns whether it was halted. Raises RuntimeError after
        `max_events` events, because some loop then runs forever."""
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
