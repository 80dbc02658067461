"""The virtual clock and the events of all processes, in one thread: one seed gives one run.

Law: events run by time, and those of one instant in the order in which they were made. No order
comes from addresses or hashes, and no two purposes share a source of chance, so that leaving one
event out moves nothing else.
"""

from __future__ import annotations

import heapq
import struct
import zlib
from asyncio import events
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

Call = Callable[..., Any]

_TIME = struct.Struct("<d")


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
        self.checksum = 0
        """Of all that was traced: equal for equal runs."""
        self.log: list[tuple[float, str, int]] | None = None
        """If it is a list: what was traced, as time, label and bytes of the frame."""
        self.failures: list[str] = []
        """Loops and callbacks that have raised."""
        self._halted = False
        self._made = 0
        self._heap: list[tuple[float, int, Owner, Call, tuple[Any, ...]]] = []
        self._ready: deque[tuple[Owner, Call, tuple[Any, ...]]] = deque()
        """Events of this instant; those of the heap for the same instant are older."""

    def random(self, name: str) -> Random:
        """A source of chance of its own."""
        return Random(f"{self.seed}:{name}")

    def at(self, when: float, owner: Owner, call: Call, *args: Any) -> None:
        """Run `call(*args)` at a time, now if it has passed."""
        if when <= self.now:
            self._ready.append((owner, call, args))
        else:
            self._made += 1
            heapq.heappush(self._heap, (when, self._made, owner, call, args))

    def soon(self, owner: Owner, call: Call, *args: Any) -> None:
        self._ready.append((owner, call, args))

    def reschedule(self, owner: Owner, when: Callable[[Call], float | None]) -> None:
        """Move the waiting events of an owner: `when` gives their new times, None to let one be."""
        for index, (_, number, whose, call, args) in enumerate(self._heap):
            if whose is owner and (new := when(call)) is not None:
                self._heap[index] = (max(new, self.now), number, whose, call, args)
        heapq.heapify(self._heap)

    def trace(self, label: bytes, frame: bytes = b"") -> None:
        """Make it part of the checksum. Neither may hold addresses, times of the machine or the
        order of a set."""
        head = zlib.crc32(_TIME.pack(self.now) + label, self.checksum)
        self.checksum = zlib.crc32(frame, head)
        if self.log is not None:
            self.log.append((self.now, label.decode(), len(frame)))

    def halt(self) -> None:
        """End `run` after this event."""
        self._halted = True

    def run(self, until_s: float, max_events: float = float("inf")) -> bool:
        """Run events up to a time. True if it was halted. Raises RuntimeError if there are more
        events than `max_events`: something turns without end."""
        heap, ready, set_loop = self._heap, self._ready, events._set_running_loop
        loop = None
        last = self.events + max_events
        self._halted = False
        try:
            while not self._halted:
                if ready and not (heap and heap[0][0] <= self.now):
                    owner, call, args = ready.popleft()
                elif heap and heap[0][0] <= until_s:
                    self.now, _, owner, call, args = heapq.heappop(heap)
                else:
                    self.now = max(self.now, until_s)
                    return False
                if not owner.runs:
                    owner.hold(call, args)
                    continue
                if owner.loop is not loop and owner.loop is not None:
                    loop = owner.loop
                    set_loop(loop)
                self.events += 1
                try:
                    call(*args)
                except ProcessExited:
                    pass
                except Exception as error:
                    owner.fail(getattr(call, "__qualname__", "event"), error)
                if self.events >= last:
                    raise RuntimeError(f"{self.events} events until {self.now:.3f} s")
        finally:
            set_loop(None)
        return True
