"""Waves: engines that share collectives step together, and stop together.

While any engine of a group has work, all step, the idle ones without rows; then all stop. Both
halves are pure: a message in, messages out; no sockets, no clock.

The rules. An *epoch* is one fixed group of engines; a *wave* is one run of it.

1.  Only engines start waves. A stopped engine that receives work runs first and then says
    `StartWave`. What an ingress believes about waves is never asked.
2.  The coordinator accepts `StartWave(w)` if w is newer than its own wave, or equal while it sees
    nobody running; then it tells the others.
3.  An engine ignores a start that is older than its own wave. One that is newer than the wave it
    still runs in is remembered: that wave ends, and the next begins at once.
4.  Every step begins with one small sum over the group: who wants another step, who votes for a
    pause. All engines read the same sums in the same order, so whatever is decided by them alone
    is decided alike. With `depth` steps in flight, an engine always submits all of them before it
    reads the oldest; so when it reads sums that say "nobody", every engine has submitted exactly
    as many steps, and submits no more. The steps in flight are then read: if one of them found
    work, all go on; if none did, the wave has ended, with at most `depth` steps without rows.
5.  At the end each engine adds one to its wave, and the group's first says `WaveComplete(w)`. The
    coordinator accepts it only if it has not moved past w.
6.  A pause is a vote. Whoever is asked to pause runs and votes until the sums are unanimous; all
    then stop behind the same step and say `Paused`; whoever votes at the end of a wave begins the
    next. Starts are ignored until `Resume`, which lets all of them run the same wave again, work
    or not: so none waits for one that stayed behind. A pause is never taken back: `Resume` is said
    when all have answered, so no answer and no vote is left over for the next one.
7.  A change of the group is a pause, then a new epoch. A death is a new epoch at once: whoever is
    inside a collective is torn out of it. A group that has formed is paused, and begins by
    `Resume` when all have joined. Words of another epoch are dropped.
8.  A coordinator that takes over does not know what the one before has asked for. So it changes
    the group, even if the same engines are in it: all that is left over is of an older epoch. It
    asks for the pause first, unless it hears of engines that are paused already or out of their
    group: then others may wait for them. A report tells it of a `Broken` that nobody heard.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from swell.coordinator.wire import (
    Broken,
    CoordinatorMessage,
    EngineCommand,
    EngineHello,
    Joined,
    Pause,
    Paused,
    ReconfigureDistributedRequest,
    Resume,
    StartDPWave,
    StartWave,
    WaveComplete,
)


class Phase(enum.IntEnum):
    """What an engine does about steps."""

    OUT = 0
    """Its groups are broken, or being formed: no steps."""
    STOPPED = 1
    RUNNING = 2
    PAUSED = 3


@dataclass
class WaveMember:
    """The half of an engine that shares collectives with others."""

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
    again: bool = False
    """A start has asked for the wave after this one."""
    in_flight: int = 0
    """Steps submitted whose sums were not read."""
    finishing: bool = False
    """The sums read last said that no step need follow."""

    lockstep = True

    def may_submit(self) -> bool:
        """Whether another step must be submitted now, with rows or without."""
        return self.phase is Phase.RUNNING and not self.finishing and self.in_flight < self.depth

    def submitted(self) -> None:
        self.in_flight += 1

    def on_all_reduce(self, working: int, pausing: int, has_work: bool) -> list[CoordinatorMessage]:
        """The oldest step in flight is done: `working` engines want another, `pausing` vote."""
        self.in_flight -= 1
        agreed = pausing == len(self.ranks)
        self.finishing = agreed or not working
        if not self.finishing or self.in_flight:
            return []
        self.finishing = False
        return self._pause() if agreed else self._complete(has_work)

    def work_arrived(self) -> list[CoordinatorMessage]:
        """A request came. Stopped engines run, then tell."""
        return self._begin() if self.phase is Phase.STOPPED else []

    def start(self, message: StartDPWave) -> list[CoordinatorMessage]:
        if message.epoch != self.epoch or message.wave < self.wave:
            return []
        if self.phase is Phase.STOPPED:
            self.phase = Phase.RUNNING
        elif self.phase is Phase.RUNNING:
            self.again |= message.wave > self.wave
        return []

    def pause(self, message: Pause) -> list[CoordinatorMessage]:
        if message.epoch != self.epoch or self.phase is Phase.OUT:
            return []
        if self.phase is Phase.PAUSED:
            return [Paused(self.rank, self.incarnation, self.epoch)]
        self.voting = True
        return self._begin() if self.phase is Phase.STOPPED else []

    def resume(self, message: Resume) -> list[CoordinatorMessage]:
        if message.epoch == self.epoch and self.phase is Phase.PAUSED:
            self.phase, self.voting = Phase.RUNNING, False
        return []

    def reconfigure(self, message: ReconfigureDistributedRequest) -> bool:
        """Leave the group; False for a word of an older epoch. The engine forms the groups and
        calls `joined` or `broken`; if it is not in `ranks` it stays out until it is asked again."""
        if message.epoch <= self.epoch:
            return False
        self._leave()
        self.epoch, self.wave, self.ranks = message.epoch, message.wave, tuple(message.ranks)
        return True

    def joined(self) -> list[CoordinatorMessage]:
        """The groups of the epoch stand."""
        self.phase = Phase.PAUSED
        return [Joined(self.rank, self.incarnation, self.epoch)]

    def broken(self, reason: str, repairing: bool = False) -> list[CoordinatorMessage]:
        """The groups have failed, or could not be formed."""
        self._leave()
        return [Broken(self.rank, self.incarnation, self.epoch, reason, repairing)]

    def _leave(self) -> None:
        self.phase, self.in_flight = Phase.OUT, 0
        self.voting = self.finishing = self.again = False

    def _begin(self) -> list[CoordinatorMessage]:
        self.phase = Phase.RUNNING
        return [StartWave(self.rank, self.incarnation, self.epoch, self.wave)]

    def _pause(self) -> list[CoordinatorMessage]:
        self.phase = Phase.PAUSED
        return [Paused(self.rank, self.incarnation, self.epoch)]

    def _complete(self, has_work: bool) -> list[CoordinatorMessage]:
        out: list[CoordinatorMessage] = []
        if self.rank == self.ranks[0]:
            out.append(WaveComplete(self.rank, self.incarnation, self.epoch, self.wave))
        self.wave += 1
        self.phase = Phase.STOPPED
        if has_work or self.voting:
            out += self._begin()
        elif self.again:
            self.phase = Phase.RUNNING
        self.again = False
        return out


class GroupState(enum.StrEnum):
    """What the coordinator does about the group."""

    SERVING = "serving"
    PAUSING = "pausing"
    PAUSED = "paused"
    FORMING = "forming"


RankedCommands = list[tuple[int, EngineCommand]]
"""Commands, and the rank that each is for."""


@dataclass
class WaveCoordinator:
    """The half of the coordinator."""

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
    heard: frozenset[int] = frozenset()
    """Who has answered in this group_state."""
    inherited: bool = False
    """Nobody knows what the coordinator before asked this group to do."""

    # ---------------------------------------------------------------- what engines say

    def start_wave(self, rank: int, epoch: int, wave: int) -> RankedCommands:
        if epoch != self.epoch:
            return []
        if wave > self.wave or (wave == self.wave and not self.running):
            self.wave, self.running = wave, True
            return [(r, StartDPWave(epoch, wave)) for r in self.ranks if r != rank]
        return []

    def wave_complete(self, epoch: int, wave: int) -> None:
        if epoch == self.epoch and self.wave <= wave:
            self.wave, self.running = wave + 1, False

    def paused(self, rank: int, epoch: int) -> RankedCommands:
        return self._on_acknowledged(rank) if epoch == self.epoch else []

    def joined(self, rank: int, epoch: int) -> RankedCommands:
        return self._on_acknowledged(rank) if epoch == self.epoch else []

    def broken(self, epoch: int) -> RankedCommands:
        """A group failed: whoever is left forms the next. A death is told apart, by `change`."""
        return self._form() if epoch == self.epoch else []

    def report(
        self, rank: int, epoch: int, wave: int, phase: Phase, voting: bool
    ) -> RankedCommands:
        """What an engine is seen doing, told again and again."""
        if phase is Phase.OUT and rank in self.ranks and self.group_state is not GroupState.FORMING:
            return self.broken(epoch)
        return []

    # ---------------------------------------------------------------- what is wanted

    def change(self, target_ranks: tuple[int, ...], lost: bool = False) -> RankedCommands:
        """The group is to be `target_ranks`. `lost`: who is missing there takes no part any more,
        so a pause cannot be agreed."""
        gone = lost and not set(self.ranks) <= set(target_ranks)
        if target_ranks == self.target_ranks and not gone:
            return []
        self.target_ranks = target_ranks
        if gone or not self.ranks or self.group_state is GroupState.PAUSED:
            return self._form()
        return self._request_pause()

    def pause(self) -> RankedCommands:
        """An operator's pause."""
        self.pause_requested = True
        return self._request_pause()

    def resume(self) -> RankedCommands:
        """A pause that was asked for is first agreed: an answer is never left over for the next."""
        self.pause_requested = False
        return self._resume() if self.group_state is GroupState.PAUSED else []

    def recover(self, hellos: Sequence[EngineHello]) -> RankedCommands:
        """Take over the engines that an earlier coordinator left. They form a group: when they
        have agreed to pause if all members of the newest one step or can begin, else at once."""
        newest = max(hellos, key=lambda hello: hello.epoch, default=None)
        if newest is None:
            return []
        self.epoch, self.wave = newest.epoch, newest.wave
        self.target_ranks = tuple(sorted(hello.member.rank for hello in hellos))
        able = {
            hello.member.rank
            for hello in hellos
            if hello.epoch == self.epoch and hello.phase in (Phase.STOPPED, Phase.RUNNING)
        }
        if not newest.ranks or not set(newest.ranks) <= able:
            return self._form()
        self.ranks, self.inherited = tuple(newest.ranks), True
        return self._request_pause()

    # ---------------------------------------------------------------- stages

    def _request_pause(self) -> RankedCommands:
        if self.group_state is not GroupState.SERVING or not self.ranks:
            return []
        self.group_state, self.heard = GroupState.PAUSING, frozenset()
        return [(rank, Pause(self.epoch)) for rank in self.ranks]

    def _on_acknowledged(self, rank: int) -> RankedCommands:
        self.heard |= {rank}
        if self.heard != set(self.ranks):
            return []
        if self.target_ranks != self.ranks or self.inherited:
            return self._form()
        if self.pause_requested:
            self.group_state = GroupState.PAUSED
            return []
        return self._resume()

    def _form(self) -> RankedCommands:
        """The next epoch, for those that are wanted; those that are not hear that they left."""
        told = sorted({*self.ranks, *self.target_ranks})
        self.epoch, self.wave, self.running = self.epoch + 1, self.wave + 1, False
        self.ranks, self.heard, self.inherited = self.target_ranks, frozenset(), False
        self.group_state = GroupState.FORMING if self.ranks else GroupState.SERVING
        message = ReconfigureDistributedRequest(self.epoch, list(self.ranks), self.wave)
        return [(rank, message) for rank in told]

    def _resume(self) -> RankedCommands:
        self.group_state, self.running = GroupState.SERVING, True
        return [(rank, Resume(self.epoch)) for rank in self.ranks]
