"""Waves of engines that share nothing: no group is formed, and each engine pauses independently."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swell.coordinator.wave_protocol.wave_interface import (
    CoordinatorWaves,
    EngineWaves,
    GroupState,
    Phase,
    RankedCommands,
)
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
class NullMember(EngineWaves):
    """The engine's half without waves: an engine steps while it has rows, unless it is paused."""

    phase: Phase = Phase.RUNNING

    needs_coordinator = False

    @property
    def lockstep(self) -> bool:
        return False

    def may_submit(self) -> bool:
        return self.phase is Phase.RUNNING and not self.voting and self.in_flight < self.depth

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

    def serve_standalone(self, epoch: int) -> bool:
        return False

    def joined(self) -> list[CoordinatorMessage]:
        """Called when the engine's own groups have formed again."""
        self.phase = Phase.RUNNING
        return self._pause_if_idle() if self.voting else []

    def broken(
        self, reason: str, repairing: bool = False, absent: Iterable[int] = ()
    ) -> list[CoordinatorMessage]:
        self.phase, self.in_flight = Phase.OUT, 0
        return [Broken(self.rank, self.incarnation, self.epoch, reason, repairing)]

    def _pause_if_idle(self) -> list[CoordinatorMessage]:
        if self.in_flight or self.phase is Phase.OUT:
            return []
        self.phase = Phase.PAUSED
        return [Paused(self.rank, self.incarnation, self.epoch)]


@dataclass
class NullCoordinator(CoordinatorWaves):
    """The coordinator's half: every target rank is in the group at once."""

    lockstep = False

    def start_wave(self, rank: int, epoch: int, wave: int) -> RankedCommands:
        return []

    def wave_complete(self, epoch: int, wave: int) -> None:
        """Does nothing: there are no waves."""

    def joined(self, rank: int, epoch: int) -> RankedCommands:
        return []

    def broken(self, epoch: int) -> RankedCommands:
        return []

    def paused(self, rank: int, epoch: int, number: int) -> RankedCommands:
        return []

    def report(
        self, rank: int, epoch: int, wave: int, phase: Phase, voting: bool
    ) -> RankedCommands:
        """Repeats the command for an engine that does not have the state that the operator
        requested."""
        if self.pause_requested == (voting or phase is Phase.PAUSED) or rank not in self.ranks:
            return []
        return [(rank, Pause(0) if self.pause_requested else Resume(0))]

    def left_out(self, epoch: int, phase: Phase) -> None:
        """Returns None: an engine that was removed computes its requests without the others."""

    def change(self, target_ranks: tuple[int, ...], lost: bool = False) -> RankedCommands:
        self.ranks = self.target_ranks = target_ranks
        return []

    def recover(self, hellos: Sequence[EngineHello]) -> RankedCommands:
        return self.change(tuple(sorted(hello.member.rank for hello in hellos)))

    def introduced(self, rank: int, epoch: int) -> RankedCommands:
        return []

    def pause(self) -> RankedCommands:
        self.pause_requested, self.group_state = True, GroupState.PAUSED
        return [(rank, Pause(0)) for rank in self.ranks]

    def resume(self) -> RankedCommands:
        self.pause_requested, self.group_state = False, GroupState.SERVING
        return [(rank, Resume(0)) for rank in self.ranks]
