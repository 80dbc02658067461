"""One engine, as its manager knows it from planning to termination."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from swell.cluster.control.plan.checkpoint import DrainRecord
from swell.cluster.control.plan.fleet_view import EngineStatus, Intent, Place
from swell.cluster.control.plan.versions import Version
from swell.cluster.control.ray.ray_interface import Actor, Group
from swell.coordinator.roster import Member, MemberState, Roster
from swell.coordinator.wire import EngineReport
from swell.engine.serving.actor_results import EngineReady, StartStatus


class StartFailed(RuntimeError):
    """Raised if an engine did not start. `permanent`: it would fail again in the same way."""

    def __init__(self, message: str, *, permanent: bool) -> None:
        super().__init__(message)
        self.permanent = permanent


class WeightsRefused(StartFailed):
    """Raised if an engine could not load the weights of another version: it can start again with
    its own."""

    def __init__(self, message: str, version: Version) -> None:
        """`version`: the version of its own weights."""
        super().__init__(message, permanent=True)
        self.version = version


class NoRoom(StartFailed):
    """Raised if there was no room for an engine: none of its processes was started."""

    def __init__(self, message: str) -> None:
        super().__init__(message, permanent=False)


@dataclass(eq=False)
class EngineHandle:
    """One engine that is placed or planned."""

    rank: int
    name: str = ""
    """Name of this start of the engine's processes, unique."""
    version: Version | None = None
    """The version that the engine runs; None: unknown."""
    next_version: Version | None = None
    """The version that the engine runs after it has left and joined again; None: it stops."""
    previous: Version | None = None
    """The version that its processes ran before they got other weights; None once it serves."""
    is_extra: bool = False
    """The engine starts in addition to the target number, and counts once it serves."""
    for_answers: bool = False
    """The engine is started because unfinished responses need its version. It waits for room, and
    other engines make room for it."""
    actor: Actor | None = None
    group: Group | None = None
    in_doubt: bool = False
    """Ray has not answered a call to create or terminate a part of the engine."""
    ready: EngineReady | None = None
    process_s: float | None = None
    """How long the engine's process took to start; None: another manager started it."""
    waits_for_room: str | None = None
    """Why the engine cannot be placed yet; None: it is placed, or will be in a moment."""
    starting: asyncio.Task[None] | None = None
    """The start; it runs until the engine is ready."""
    start_status: StartStatus | None = None
    """The newest answer of the starting engine; None: there was none yet."""
    intent: Intent = Intent.STAY
    left_at: float = 0.0
    """When the engine was first told to leave, by the clock of the manager's event loop, as all
    times here."""
    leave_deadline_s: float = 0.0
    """When the engine is detached even if it has requests."""
    unmarked_since: float = 0.0
    """When the engine was last told to leave."""
    is_marked: bool = False
    """The coordinator has been told after `unmarked_since` that the engine leaves."""
    drain: DrainRecord | None = None
    """The record of this drain for the next manager; None: the engine was never told to leave."""
    left_epoch: int = 0
    """Epoch of the first roster that lists the engine as leaving."""
    idle_polls: int = 0
    """The number of polls in a row that found the engine without requests, under one roster."""
    idle_epoch: int = 0
    """Epoch of the roster that `idle_polls` refers to."""
    in_transition: bool = False
    """The manager is changing the engine's membership."""
    joined_at: float = 0.0
    ended: str | None = None
    """Why the engine has stopped; None: it has not."""
    exit_watcher: asyncio.Task[None] | None = None

    @property
    def leaving(self) -> bool:
        """Whether the engine must accept no new requests and then stop or reload; a starting engine
        must be cancelled."""
        return self.intent in (Intent.LEAVE, Intent.DRAIN, Intent.RELOAD)

    def reloading(self, version: Version) -> EngineHandle:
        """Returns the handle of the next engine of these processes. They load the weights of
        `version` after this engine has left. The caller must not use this handle any more."""
        if self.exit_watcher is not None:
            self.exit_watcher.cancel()
        return EngineHandle(
            self.rank,
            self.name,
            version,
            previous=self.version,
            actor=self.actor,
            group=self.group,
            in_doubt=self.in_doubt,
            ready=self.ready,
            process_s=self.process_s,
            ended=self.ended,
        )

    def status(self, place: Place, *, is_vacating: bool) -> EngineStatus:
        """Returns the engine as the manager's decisions see it."""
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
        """Counts the polls in a row that found no requests. `epoch`: epoch of the newest roster.
        `report`: the newest report of this engine. It counts only if the engine made it after it
        received that roster: an ingress may have sent a request under this roster that it did not
        send under an earlier one."""
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
        """Returns this engine's entry in a roster; None: it is not a member."""
        assert self.ready is not None
        return roster.find(self.rank, self.ready.incarnation)

    @property
    def member(self) -> Member:
        """This engine as a roster entry. One that leaves may join again, at a coordinator that has
        restarted, and then gets no new requests."""
        assert self.ready is not None
        limits = self.ready.limits
        return Member(
            self.rank,
            self.ready.address,
            MemberState.LEAVING if self.leaving else MemberState.ACTIVE,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            incarnation=self.ready.incarnation,
            store=self.ready.store,
            num_blocks=limits.num_blocks,
            version=self.version_name,
            numerics=limits.numerics,
        )
