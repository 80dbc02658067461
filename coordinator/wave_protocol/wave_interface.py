"""Interfaces of the two kinds of waves: for engines that share experts (`waves.py`), and the null
kind for engines that share nothing (`null_waves.py`).

Each kind has two halves, one in every engine and one in the coordinator. Both halves are pure state
machines: messages in, messages out; no sockets, no clock.
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
    """Whether, and how, an engine steps."""

    OUT = 0
    """The engine's groups are broken, or it is in no group: it does not step."""
    STOPPED = 1
    RUNNING = 2
    PAUSED = 3
    STANDALONE = 4
    """The engine's group is broken or paused, and no coordinator is reachable: until one is, the
    engine steps without the others."""
    FORMING = 5
    """The engine's groups are being formed: it does not step."""


WITHOUT_GROUP = frozenset({Phase.OUT, Phase.FORMING})


class GroupState(enum.StrEnum):
    """State of the group at the coordinator."""

    SERVING = "serving"
    PAUSING = "pausing"
    PAUSED = "paused"
    FORMING = "forming"


RankedCommands = list[tuple[int, EngineCommand]]
"""Commands, each with the rank of its receiver."""


@dataclass
class EngineWaves(ABC):
    """The half of an engine: decides when to submit a step. A method that returns messages returns
    those that the engine must send to the coordinator, in order."""

    rank: int
    incarnation: int
    depth: int
    """Maximum number of steps in flight: the same on all engines."""
    epoch: int = 0
    wave: int = 0
    phase: Phase = Phase.OUT
    ranks: tuple[int, ...] = ()
    """Ranks of the group, in order."""
    voting: bool = False
    """Whether the engine votes for a pause."""
    in_flight: int = 0
    """Number of submitted steps whose results were not read yet."""
    pause_number: int = 0
    """Number of the newest pause of this epoch that this engine was asked for."""

    @property
    @abstractmethod
    def lockstep(self) -> bool:
        """Whether engines step together: also those without rows, while one of them has work."""

    @property
    @abstractmethod
    def needs_coordinator(self) -> bool:
        """Whether a new request must wait for a message of the coordinator before it is
        computed."""

    @abstractmethod
    def may_submit(self) -> bool:
        """Whether another step may be submitted now; in lockstep mode it then must be."""

    def submitted(self) -> None:
        self.in_flight += 1

    def discard_steps(self) -> None:
        """Drops the submitted steps, whose results will not be read."""
        self.in_flight = 0

    @abstractmethod
    def on_all_reduce(self, working: int, pausing: int, has_work: bool) -> list[CoordinatorMessage]:
        """Handles the result of the oldest step in flight: `working` engines want another step,
        `pausing` engines vote for a pause. `has_work`: this engine has requests."""

    @abstractmethod
    def work_arrived(self) -> list[CoordinatorMessage]:
        """Handles a new request."""

    @abstractmethod
    def start(self, message: StartDPWave) -> list[CoordinatorMessage]:
        """Handles the start of a wave by another engine."""

    @abstractmethod
    def pause(self, message: Pause) -> list[CoordinatorMessage]: ...

    @abstractmethod
    def resume(self, message: Resume) -> list[CoordinatorMessage]: ...

    @abstractmethod
    def reconfigure(self, message: ReconfigureDistributedRequest) -> bool:
        """Leaves the group for that of a newer epoch; returns False if the message is stale. The
        engine then forms the groups and calls `joined` or `broken`. An engine that is not in
        `message.ranks` stays out until the next such message."""

    @abstractmethod
    def serve_standalone(self, epoch: int) -> bool:
        """Steps without the other engines of the group of `epoch`, which is broken or paused; if
        that fails, too, call `broken`. Returns False, without changes, if the engine steps or
        `epoch` is not its newest."""

    @abstractmethod
    def joined(self) -> list[CoordinatorMessage]:
        """Reports that the groups have formed."""

    @abstractmethod
    def broken(
        self, reason: str, repairing: bool = False, absent: Iterable[int] = ()
    ) -> list[CoordinatorMessage]:
        """Reports that the groups have failed, or could not be formed. `repairing`: a worker was
        lost. `absent`: indices in `ranks` of engines that did not join, or cannot be reached."""


@dataclass
class CoordinatorWaves(ABC):
    """The half of the coordinator: the current group and the target group. A method that returns
    commands returns those that the coordinator must send."""

    epoch: int = 0
    wave: int = 0
    running: bool = False
    """Whether the group runs a wave, as engines reported."""
    group_state: GroupState = GroupState.SERVING
    ranks: tuple[int, ...] = ()
    """Ranks of the group, in order."""
    target_ranks: tuple[int, ...] = ()
    """Ranks of the target group."""
    pause_requested: bool = False
    """Whether an operator has requested a pause."""
    acknowledged: frozenset[int] = frozenset()
    """Ranks that have answered in the current group state."""

    lockstep: ClassVar[bool]
    """Whether engines step together."""

    @property
    def stepping(self) -> frozenset[int]:
        """Ranks that must make progress with their work: those of the group, until they have
        answered a pause. Newcomers only wait for the group, and while it forms, its deadline
        applies instead."""
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
        """Handles a failed group without a lost engine; for a lost engine, `change` is called."""

    @abstractmethod
    def report(
        self, rank: int, epoch: int, wave: int, phase: Phase, voting: bool
    ) -> RankedCommands:
        """Handles the periodic report of an engine's state: repairs the effects of lost
        messages."""

    @abstractmethod
    def left_out(self, epoch: int, phase: Phase) -> ReconfigureDistributedRequest | None:
        """Returns the answer to a report of an engine that was removed: the command to leave its
        group, if it has not executed one. Without it, the engine would wait for the others."""

    # ---------------------------------------------------------------- requested changes

    @abstractmethod
    def change(self, target_ranks: tuple[int, ...], lost: bool = False) -> RankedCommands:
        """Changes the group to `target_ranks`. `lost`: engines that are missing there no longer
        take part, so they cannot agree to a pause."""

    @abstractmethod
    def recover(self, hellos: Sequence[EngineHello]) -> RankedCommands:
        """Takes over the engines of an earlier coordinator."""

    @abstractmethod
    def introduced(self, rank: int, epoch: int) -> RankedCommands:
        """Handles an engine that finds this coordinator only after its recovery: the engine accepts
        only commands of an epoch that is newer than its own."""

    @abstractmethod
    def pause(self) -> RankedCommands:
        """Pauses for an operator."""

    @abstractmethod
    def resume(self) -> RankedCommands:
        """Ends an operator's pause."""
