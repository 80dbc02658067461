"""The state of the model: a tuple of tuples, so that it is hashable."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

from swell.coordinator.wave_protocol.wave_interface import Phase
from swell.kernels.inputs import Bucket

Packed = tuple[Any, ...]
"""A message as a hashable tuple: its class and its fields."""


class Violation(AssertionError):
    """The wave protocol allows something that it must not."""


class EngineState(enum.IntEnum):
    """The place of an engine relative to its group; `Phase` holds its state inside the group."""

    DEAD = 0
    OUTSIDE = 1
    FORMING = 2
    INSIDE = 3
    BROKEN = 4
    """Waits for the next group to be announced, or computes on its own meanwhile."""
    REPAIRING = 5


class Job(NamedTuple):
    """A request: how many steps it needs, and how its last step is recognized."""

    name: int
    kind: str
    """One of: "known", scheduled ahead, with a last step that is known in advance. "eos", scheduled
    ahead, with a last step that is recognized when it is read. "stepwise", with a step that is
    scheduled only after the previous one was read."""
    unscheduled: int
    unread: int

    @property
    def works(self) -> bool:
        return (self.unread if self.kind == "eos" else self.unscheduled) > 0

    def schedule(self) -> Job | None:
        """Returns the job with one more step in flight; None if no step can be scheduled."""
        if not self.works or (self.kind == "stepwise" and self.unread > self.unscheduled):
            return None
        return self if self.kind == "eos" else self._replace(unscheduled=self.unscheduled - 1)


class Step(NamedTuple):
    """The contribution of one engine to one step."""

    wave: int
    works: bool
    votes: bool
    rows: tuple[int, ...]
    """The names of the jobs."""


class Group(NamedTuple):
    """The steps of one epoch, from the oldest that some engine has yet to read."""

    epoch: int
    ranks: tuple[int, ...]
    logs: tuple[tuple[Step, ...], ...]
    """The steps of each engine, by its position in `ranks`."""
    reads: tuple[int, ...]
    """The number of these steps that each engine has read; -1 for an engine that has left."""


class Fields(NamedTuple):
    """The fields of a `WaveMember` that change."""

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
    """The number of steps read since the last one in which any engine had rows or votes."""
    inbox: tuple[Packed, ...] = ()
    outbox: tuple[Packed, ...] = ()
    greeted: bool = True
    """Whether the engine has introduced itself to this coordinator."""
    captured: frozenset[Bucket] = frozenset()
    """The steps that the engine has captured in its group; see `Bounds.captures`."""


class Budget(NamedTuple):
    """How often each event may still happen."""

    requests: int = 0
    pauses: int = 0
    joins: int = 0
    detaches: int = 0
    deaths: int = 0
    losses: int = 0
    """Losses of workers."""
    restarts: int = 0
    """Restarts of the coordinator."""
    late_reports: int = 0
    errors: int = 0
    """Steps and group formations that fail because a peer is gone."""
    drops: int = 0
    """Connection resets: all messages in transit in one direction are lost."""
    alones: int = 0
    """Engines of a broken group that continue on their own, with or without a coordinator."""


class State(NamedTuple):
    engines: tuple[Engine, ...]
    groups: tuple[Group, ...]
    coordinator: tuple[Any, ...] | None
    """The packed coordinator; None while it restarts."""
    hellos: tuple[Packed, ...]
    desired: frozenset[int]
    """The ranks that the manager wants."""
    unnoticed: frozenset[int]
    """Dead engines that the manager has not noticed yet."""
    left: Budget

    def with_engines(self, engines: tuple[Engine, ...]) -> State:
        """Returns this state with other engines: `_replace` takes three times as long."""
        return State(engines, *self[1:])


@dataclass(frozen=True)
class Bounds:
    engines: int
    depth: int
    jobs: tuple[tuple[str, int], ...] = ()
    """The kind and the number of steps of each request, in order of arrival."""
    newcomers: int = 0
    pauses: int = 0
    detaches: int = 0
    deaths: int = 0
    losses: int = 0
    restarts: int = 0
    reports: bool = False
    """Whether engines report; each report is owed and sent at once."""
    late_reports: int = 0
    """Reports that are delivered after newer messages."""
    errors: int = 0
    drops: int = 0
    alones: int = 0
    captures: bool = False
    """Whether engines that share experts capture their steps, and replay them later."""


Transition = tuple[str, bool, State]
"""The name of the move, whether it is owed, and the next state."""


def pack(message: Any) -> Packed:
    fields = (getattr(message, name) for name in message.__struct_fields__)
    return (type(message), *(tuple(f) if isinstance(f, list) else f for f in fields))


def unpack(value: Any) -> Any:
    """Returns the message of a packed tuple; other arguments of a half are returned as they are."""
    if not isinstance(value, tuple) or not value:
        return value
    if isinstance(value[0], type):
        return value[0](*value[1:])
    return [unpack(item) for item in value] if isinstance(value[0], tuple) else value


def put(items: tuple[Any, ...], at: int, item: Any) -> tuple[Any, ...]:
    return (*items[:at], item, *items[at + 1 :])
