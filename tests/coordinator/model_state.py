"""What a state of the world is: a tuple of tuples, so that it can be hashed."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

from swell.coordinator.wave_protocol.wave_interface import Phase

Packed = tuple[Any, ...]
"""A message: its class and its fields, hashable."""


class Violation(AssertionError):
    """The rules of waves allow what they must not."""


class EngineState(enum.IntEnum):
    """Where an engine is; `Phase` tells what it does inside."""

    DEAD = 0
    OUTSIDE = 1
    FORMING = 2
    INSIDE = 3
    BROKEN = 4
    """Waits to be told the next group, or computes alone meanwhile."""
    REPAIRING = 5


class Job(NamedTuple):
    """A request: how many steps it needs, and how its end is seen."""

    name: int
    kind: str
    """known: scheduled ahead, its end is known. eos: scheduled ahead, its end is seen when its
    last step is read. stepwise: a step is scheduled when the one before it was read."""
    unscheduled: int
    unread: int

    @property
    def works(self) -> bool:
        return (self.unread if self.kind == "eos" else self.unscheduled) > 0

    def schedule(self) -> Job | None:
        """With one more step in flight; None if none can be scheduled."""
        if not self.works or (self.kind == "stepwise" and self.unread > self.unscheduled):
            return None
        return self if self.kind == "eos" else self._replace(unscheduled=self.unscheduled - 1)


class Step(NamedTuple):
    """What one engine gave to one step."""

    wave: int
    works: bool
    votes: bool
    rows: tuple[int, ...]
    """Names of jobs."""


class Group(NamedTuple):
    """The steps of one epoch, since the oldest that somebody has yet to read."""

    epoch: int
    ranks: tuple[int, ...]
    logs: tuple[tuple[Step, ...], ...]
    """By position in `ranks`."""
    reads: tuple[int, ...]
    """Steps read of these; -1 for an engine that has left."""


class Fields(NamedTuple):
    """A `WaveMember`, less what never changes."""

    epoch: int = 0
    wave: int = 0
    phase: Phase = Phase.OUT
    ranks: tuple[int, ...] = ()
    voting: bool = False
    in_flight: int = 0
    pause_number: int = 0
    start_pending: bool = False
    finishing: bool = False


class Engine(NamedTuple):
    place: EngineState
    fields: Fields
    jobs: tuple[Job, ...] = ()
    quiet: int = 0
    """Steps read since the last with rows or votes anywhere."""
    inbox: tuple[Packed, ...] = ()
    outbox: tuple[Packed, ...] = ()
    greeted: bool = True
    """It has introduced itself to this coordinator."""


class Budget(NamedTuple):
    """How often each may still happen."""

    requests: int = 0
    pauses: int = 0
    joins: int = 0
    detaches: int = 0
    deaths: int = 0
    losses: int = 0
    """Of workers."""
    restarts: int = 0
    """Of the coordinator."""
    late_reports: int = 0
    errors: int = 0
    """Steps and groups that fail because a peer is gone."""
    drops: int = 0
    """Connections that are reset: all that is under way one way is lost."""
    alones: int = 0
    """Engines of a broken group that go on alone, whether or not a coordinator is there."""


class State(NamedTuple):
    engines: tuple[Engine, ...]
    groups: tuple[Group, ...]
    coordinator: tuple[Any, ...] | None
    """None: it is being restarted."""
    hellos: tuple[Packed, ...]
    desired: frozenset[int]
    """By the manager."""
    unnoticed: frozenset[int]
    """Deaths that the manager has yet to see."""
    left: Budget


@dataclass(frozen=True)
class Bounds:
    engines: int
    depth: int
    jobs: tuple[tuple[str, int], ...] = ()
    """Kind and steps of each request, in the order of their arrival."""
    newcomers: int = 0
    pauses: int = 0
    detaches: int = 0
    deaths: int = 0
    losses: int = 0
    restarts: int = 0
    reports: bool = False
    """Engines report: owed, and at once."""
    late_reports: int = 0
    """Reports that arrive behind other messages."""
    errors: int = 0
    drops: int = 0
    alones: int = 0


Transition = tuple[str, bool, State]
"""Its name, whether it is owed, and what follows."""


def pack(message: Any) -> Packed:
    fields = (getattr(message, name) for name in message.__struct_fields__)
    return (type(message), *(tuple(f) if isinstance(f, list) else f for f in fields))


def unpack(value: Any) -> Any:
    """A message, or whatever else is given to a half."""
    if not isinstance(value, tuple) or not value:
        return value
    if isinstance(value[0], type):
        return value[0](*value[1:])
    return [unpack(item) for item in value] if isinstance(value[0], tuple) else value


def put(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])
