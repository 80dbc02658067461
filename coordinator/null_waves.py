"""The group of engines that share nothing: it never has to form, and each pauses alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swell.coordinator.waves import GroupState, Phase, RankedCommands
from swell.coordinator.wire import (
    Broken,
    CoordinatorMessage,
    EngineHello,
    Pause,
    Paused,
    ReconfigureDistributedRequest,
    Resume,
    StartDPWave,
)


@dataclass
class NullMember:
    """The half of an engine without waves: it steps while it has rows, unless it is paused."""

    rank: int
    incarnation: int
    depth: int
    """Steps in flight."""
    epoch: int = 0
    wave: int = 0
    phase: Phase = Phase.RUNNING
    ranks: tuple[int, ...] = ()
    voting: bool = False
    in_flight: int = 0

    lockstep = False

    def may_submit(self) -> bool:
        """Whether another step may be submitted now."""
        return self.phase is Phase.RUNNING and not self.voting and self.in_flight < self.depth

    def submitted(self) -> None:
        self.in_flight += 1

    def on_all_reduce(self, working: int, pausing: int, has_work: bool) -> list[CoordinatorMessage]:
        self.in_flight -= 1
        return self._pause_if_idle() if self.voting else []

    def work_arrived(self) -> list[CoordinatorMessage]:
        return []

    def start(self, message: StartDPWave) -> list[CoordinatorMessage]:
        return []

    def pause(self, message: Pause) -> list[CoordinatorMessage]:
        self.voting = True
        return self._pause_if_idle()

    def resume(self, message: Resume) -> list[CoordinatorMessage]:
        self.voting = False
        if self.phase is Phase.PAUSED:
            self.phase = Phase.RUNNING
        return []

    def reconfigure(self, message: ReconfigureDistributedRequest) -> bool:
        return False

    def joined(self) -> list[CoordinatorMessage]:
        """Its own groups stand again."""
        self.phase = Phase.RUNNING
        return []

    def broken(self, reason: str, repairing: bool = False) -> list[CoordinatorMessage]:
        self.phase, self.in_flight = Phase.OUT, 0
        return [Broken(self.rank, self.incarnation, self.epoch, reason, repairing)]

    def _pause_if_idle(self) -> list[CoordinatorMessage]:
        if self.in_flight or self.phase is Phase.OUT:
            return []
        self.phase = Phase.PAUSED
        return [Paused(self.rank, self.incarnation, self.epoch)]


@dataclass
class NullCoordinator:
    """The half of the coordinator: whoever is target_ranks is in the group, and nobody waits."""

    epoch: int = 0
    wave: int = 0
    running: bool = False
    group_state: GroupState = GroupState.SERVING
    ranks: tuple[int, ...] = ()
    target_ranks: tuple[int, ...] = ()
    pause_requested: bool = False

    def start_wave(self, rank: int, epoch: int, wave: int) -> RankedCommands:
        return []

    def wave_complete(self, epoch: int, wave: int) -> None:
        pass

    def joined(self, rank: int, epoch: int) -> RankedCommands:
        return []

    def broken(self, epoch: int) -> RankedCommands:
        return []

    def paused(self, rank: int, epoch: int) -> RankedCommands:
        return []

    def report(
        self, rank: int, epoch: int, wave: int, phase: Phase, voting: bool
    ) -> RankedCommands:
        """Who is not as the operator wants it is told again."""
        if rank not in self.ranks or self.pause_requested == (voting or phase is Phase.PAUSED):
            return []
        return [(rank, Pause(0) if self.pause_requested else Resume(0))]

    def change(self, target_ranks: tuple[int, ...], lost: bool = False) -> RankedCommands:
        self.ranks = self.target_ranks = target_ranks
        return []

    def recover(self, hellos: Iterable[EngineHello]) -> RankedCommands:
        return self.change(tuple(sorted(hello.member.rank for hello in hellos)))

    def pause(self) -> RankedCommands:
        self.pause_requested, self.group_state = True, GroupState.PAUSED
        return [(rank, Pause(0)) for rank in self.ranks]

    def resume(self) -> RankedCommands:
        self.pause_requested, self.group_state = False, GroupState.SERVING
        return [(rank, Resume(0)) for rank in self.ranks]
