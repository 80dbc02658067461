"""The group of engines that share nothing: it never has to form, and each pauses alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swell.coordinator.waves import Phase, Sends, Stage
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

    def sums(self, working: int, pausing: int, has_work: bool) -> list[CoordinatorMessage]:
        self.in_flight -= 1
        return self._rest() if self.voting else []

    def work_arrived(self) -> list[CoordinatorMessage]:
        return []

    def start(self, message: StartDPWave) -> list[CoordinatorMessage]:
        return []

    def pause(self, message: Pause) -> list[CoordinatorMessage]:
        self.voting = True
        return self._rest()

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

    def _rest(self) -> list[CoordinatorMessage]:
        if self.in_flight or self.phase is Phase.OUT:
            return []
        self.phase = Phase.PAUSED
        return [Paused(self.rank, self.incarnation, self.epoch)]


@dataclass
class NullCoordinator:
    """The half of the coordinator: whoever is wanted is in the group, and nobody waits."""

    epoch: int = 0
    wave: int = 0
    running: bool = False
    stage: Stage = Stage.SERVING
    ranks: tuple[int, ...] = ()
    wanted: tuple[int, ...] = ()
    held: bool = False

    def start_wave(self, rank: int, epoch: int, wave: int) -> Sends:
        return []

    def wave_complete(self, epoch: int, wave: int) -> None:
        pass

    def joined(self, rank: int, epoch: int) -> Sends:
        return []

    def broken(self, epoch: int) -> Sends:
        return []

    def paused(self, rank: int, epoch: int) -> Sends:
        return []

    def report(self, rank: int, epoch: int, wave: int, phase: Phase, voting: bool) -> Sends:
        """Who is not as the operator wants it is told again."""
        if rank not in self.ranks or self.held == (voting or phase is Phase.PAUSED):
            return []
        return [(rank, Pause(0) if self.held else Resume(0))]

    def change(self, wanted: tuple[int, ...], lost: bool = False) -> Sends:
        self.ranks = self.wanted = wanted
        return []

    def recover(self, hellos: Iterable[EngineHello]) -> Sends:
        return self.change(tuple(sorted(hello.member.rank for hello in hellos)))

    def hold(self) -> Sends:
        self.held, self.stage = True, Stage.PAUSED
        return [(rank, Pause(0)) for rank in self.ranks]

    def release(self) -> Sends:
        self.held, self.stage = False, Stage.SERVING
        return [(rank, Resume(0)) for rank in self.ranks]
