"""What both kinds of waves declare: those of engines that share experts (`waves.py`), and the
null kind of engines that share nothing (`null_waves.py`).

Each kind has two halves, one in every engine and one in the coordinator. Both halves are pure:
messages in, messages out; no sockets, no clock.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from swell.coordinator.wire import (
    CoordinatorMessage,
    EngineCommand,
    EngineHello,
    Pause,
    ReconfigureDistributedRequest,
    Resume,
    StartDPWave,
)


class Phase(enum.IntEnum):
    """Whether an engine steps."""

    OUT = 0
    """Its groups are broken, or it is in none: no steps."""
    STOPPED = 1
    RUNNING = 2
    PAUSED = 3
    ALONE = 4
    """Its group is broken or paused, and no coordinator is there to go on with it: until one is, it
    steps with no other engine."""
    FORMING = 5
    """Its groups are being formed: no steps."""


WITHOUT_GROUP = frozenset({Phase.OUT, Phase.FORMING})


class GroupState(enum.StrEnum):
    """What the coordinator does about the group."""

    SERVING = "serving"
    PAUSING = "pausing"
    PAUSED = "paused"
    FORMING = "forming"


RankedCommands = list[tuple[int, EngineCommand]]
"""Commands, each with the rank that it is for."""


@dataclass
class EngineWaves(ABC):
    """The half of an engine: says when to submit a step. Every method that returns messages
    returns those that the engine must send to the coordinator, in order."""

    rank: int
    incarnation: int
    depth: int
    """Steps in flight: equal on all engines."""
    epoch: int = 0
    wave: int = 0
    phase: Phase = Phase.OUT
    ranks: tuple[int, ...] = ()
    """The group, in order."""
    voting: bool = False
    """It votes for a pause."""
    in_flight: int = 0
    """Steps submitted whose results were not read."""
    pause_number: int = 0
    """Of the newest pause of this epoch that was requested of it."""

    @property
    @abstractmethod
    def lockstep(self) -> bool:
        """Engines step together: also those without rows, as long as one of them has work."""

    @property
    @abstractmethod
    def needs_coordinator(self) -> bool:
        """A request that comes now is not computed before a message of the coordinator."""

    @abstractmethod
    def may_submit(self) -> bool:
        """Whether another step may be submitted now; under lockstep it must be."""

    def submitted(self) -> None:
        self.in_flight += 1

    @abstractmethod
    def on_all_reduce(self, working: int, pausing: int, has_work: bool) -> list[CoordinatorMessage]:
        """The oldest step in flight is done: `working` engines want another, `pausing` engines
        vote for a pause. `has_work`: this engine has requests."""

    @abstractmethod
    def work_arrived(self) -> list[CoordinatorMessage]:
        """A request came."""

    @abstractmethod
    def start(self, message: StartDPWave) -> list[CoordinatorMessage]:
        """Another engine has begun a wave."""

    @abstractmethod
    def pause(self, message: Pause) -> list[CoordinatorMessage]: ...

    @abstractmethod
    def resume(self, message: Resume) -> list[CoordinatorMessage]: ...

    @abstractmethod
    def reconfigure(self, message: ReconfigureDistributedRequest) -> bool:
        """Leave the group for the one of a newer epoch; False: the message is stale. The engine
        then forms the groups and calls `joined` or `broken`. An engine that is not in
        `message.ranks` stays out until the next such message."""

    @abstractmethod
    def serve_alone(self, epoch: int) -> bool:
        """Step without the other engines of the group of `epoch`, which is broken or paused; if
        that fails, too, call `broken`. False: it steps, or is not the newest; nothing changes."""

    @abstractmethod
    def joined(self) -> list[CoordinatorMessage]:
        """The groups have formed."""

    @abstractmethod
    def broken(
        self, reason: str, repairing: bool = False, absent: Iterable[int] = ()
    ) -> list[CoordinatorMessage]:
        """The groups have failed, or could not be formed. `repairing`: a worker was lost. `absent`:
        indices in `ranks` of engines that did not come, or cannot be reached."""


@dataclass
class CoordinatorWaves(ABC):
    """The half of the coordinator: what the group is, and what it is to be. Every method that
    returns commands returns those that the coordinator must send."""

    epoch: int = 0
    wave: int = 0
    running: bool = False
    """As engines reported."""
    group_state: GroupState = GroupState.SERVING
    ranks: tuple[int, ...] = ()
    """The group, in order."""
    target_ranks: tuple[int, ...] = ()
    """The group that is to be."""
    pause_requested: bool = False
    """An operator wants a pause."""
    acknowledged: frozenset[int] = frozenset()
    """Ranks that have answered in this group state."""

    lockstep: ClassVar[bool]
    """Engines step together."""

    @property
    def stepping(self) -> frozenset[int]:
        """Ranks whose work must progress: those of the group, until they have answered a pause.
        Whoever is to join it waits for it, and while a group forms its deadline counts."""
        match self.group_state:
            case GroupState.SERVING:
                return frozenset(self.ranks)
            case GroupState.PAUSING:
                return frozenset(self.ranks) - self.acknowledged
            case _:
                return frozenset()

    # ---------------------------------------------------------------- messages of engines

    @abstractmethod
    def start_wave(self, rank: int, epoch: int, wave: int) -> RankedCommands: ...

    @abstractmethod
    def wave_complete(self, epoch: int, wave: int) -> None: ...

    @abstractmethod
    def paused(self, rank: int, epoch: int, number: int) -> RankedCommands: ...

    @abstractmethod
    def joined(self, rank: int, epoch: int) -> RankedCommands: ...

    @abstractmethod
    def broken(self, epoch: int) -> RankedCommands:
        """A group failed, but no engine was lost; a loss comes by `change`."""

    @abstractmethod
    def report(
        self, rank: int, epoch: int, wave: int, phase: Phase, voting: bool
    ) -> RankedCommands:
        """The state of an engine, sent again and again: repairs what a lost message left."""

    # ---------------------------------------------------------------- changes that are wanted

    @abstractmethod
    def change(self, target_ranks: tuple[int, ...], lost: bool = False) -> RankedCommands:
        """The group is to be `target_ranks`. `lost`: engines that are missing there no longer
        take part, so no pause can be agreed with them."""

    @abstractmethod
    def recover(self, hellos: Sequence[EngineHello]) -> RankedCommands:
        """Take over the engines that an earlier coordinator left."""

    @abstractmethod
    def introduced(self, rank: int, epoch: int) -> RankedCommands:
        """An engine has found this coordinator only after its recovery: it takes no command of an
        epoch that is not newer than its own."""

    @abstractmethod
    def pause(self) -> RankedCommands:
        """An operator's pause."""

    @abstractmethod
    def resume(self) -> RankedCommands:
        """The end of an operator's pause."""
