"""One engine, as its manager knows it from its plan to its end."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from swell.cluster.control.drain_record import DrainRecord
from swell.cluster.control.fleet_view import EngineStatus, Intent, Place
from swell.cluster.control.ray_port import Actor, Group
from swell.cluster.control.versions import Version
from swell.coordinator.roster import Member, Roster
from swell.coordinator.wire import EngineReport
from swell.engine.ready import EngineReady


class StartFailed(RuntimeError):
    """An engine did not start. `permanent`: it would fail again in the same way."""

    def __init__(self, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.permanent = permanent


class WeightsRefused(StartFailed):
    """An engine did not get the weights of another version: it can begin anew with its own."""

    def __init__(self, message: str, version: Version) -> None:
        """`version`: its own."""
        super().__init__(message, permanent=True)
        self.version = version


class NoRoom(StartFailed):
    """There was no room for an engine: nothing of it was started."""

    def __init__(self, message: str) -> None:
        super().__init__(message, permanent=False)


@dataclass(eq=False)
class EngineHandle:
    """One engine that was placed, or is about to be."""

    rank: int
    name: str = ""
    """Of this start of its processes alone."""
    version: Version | None = None
    """What it runs; None: unknown."""
    next_version: Version | None = None
    """That it runs when it has left and joins again; None: it ends."""
    previous: Version | None = None
    """What its processes ran before they got other weights; None once it serves."""
    is_extra: bool = False
    """It starts beside those that are wanted, and counts when it serves."""
    for_answers: bool = False
    """It starts since answers that have begun need its version: it waits for room, and others give
    way to it."""
    actor: Actor | None = None
    group: Group | None = None
    in_doubt: bool = False
    """Ray was called to make or to end something of it, and has not answered."""
    ready: EngineReady | None = None
    waits_for_room: str | None = None
    """Why it cannot be placed yet; None: it is, or is about to be."""
    starting: asyncio.Task[None] | None = None
    """Until it is ready."""
    intent: Intent = Intent.STAY
    left_at: float = 0.0
    """When it was to leave, for the first time, by the clock of the manager's event loop, here and
    below."""
    leave_deadline_s: float = 0.0
    """When it is detached even if it has requests."""
    unmarked_since: float = 0.0
    """When it was to leave last."""
    is_marked: bool = False
    """The coordinator knows since then that it leaves."""
    drain: DrainRecord | None = None
    """The same for the next manager; None: it was never to leave."""
    left_epoch: int = 0
    """Of the first roster in which it was leaving."""
    idle_polls: int = 0
    """How often in a row it was seen without requests since it is leaving, under one roster."""
    idle_epoch: int = 0
    """Of that roster."""
    in_transition: bool = False
    """The manager is changing its place in the roster."""
    joined_at: float = 0.0
    repairs: int = 0
    """Workers that had been replaced when `ready` was read."""
    ended: str | None = None
    """Why it has ended."""
    exit_watcher: asyncio.Task[None] | None = None

    @property
    def leaving(self) -> bool:
        """It takes no new requests, and is to end or to begin anew; one that is starting is not
        wanted any more."""
        return self.intent in (Intent.LEAVE, Intent.DRAIN, Intent.RELOAD)

    def begin_anew(self, version: Version) -> None:
        """It has left: its processes go on as another engine, with other weights."""
        if self.exit_watcher is not None:
            self.exit_watcher.cancel()
        self.previous, self.version, self.next_version = self.version, version, None
        self.intent, self.drain, self.starting = Intent.STAY, None, None
        self.left_epoch = self.idle_polls = self.repairs = 0
        self.is_marked = self.is_extra = self.for_answers = False

    def status(self, place: Place, *, is_vacating: bool) -> EngineStatus:
        """As the manager's decisions see it."""
        return EngineStatus(
            self.rank,
            place,
            self.intent,
            self.in_transition,
            waits_for_room=self.waits_for_room is not None,
            node=self.ready.node if self.ready else None,
            version=self.version_name,
            next_version="" if self.next_version is None else self.next_version.name,
            is_extra=self.is_extra,
            for_answers=self.for_answers,
            previous="" if self.previous is None else self.previous.name,
            is_vacating=is_vacating,
        )

    def on_poll(self, report: EngineReport | None, epoch: int) -> None:
        """Count how often in a row it has no requests. `epoch`: of the newest roster. `report`: its
        newest, which counts if it was made after the engine had received that roster: an ingress
        may have sent a request under it that it sent under none before."""
        newest = max(epoch, self.left_epoch)
        is_new = report is not None and report.roster_epoch >= newest
        is_busy = report is None or report.running + report.waiting > 0
        if self.idle_epoch != epoch:
            self.idle_polls, self.idle_epoch = 0, epoch
        self.idle_polls = self.idle_polls + 1 if is_new and not is_busy else 0

    @property
    def version_name(self) -> str:
        return "" if self.version is None else self.version.name

    def find_in(self, roster: Roster) -> Member | None:
        """This engine in a roster; None: it is not there."""
        assert self.ready is not None
        return roster.find(self.rank, self.ready.incarnation)

    @property
    def member(self) -> Member:
        """The engine as the roster lists it."""
        assert self.ready is not None
        limits = self.ready.limits
        return Member(
            self.rank,
            self.ready.address,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            incarnation=self.ready.incarnation,
            store=self.ready.store,
            num_blocks=limits.num_blocks,
            version=self.version_name,
        )
