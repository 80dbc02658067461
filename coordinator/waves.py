"""Waves: engines that share collectives step together, and stop together.

While any engine of a group has work, all step, the idle ones without rows; then all stop. The
halves are declared in `wave_interface.py`.

The rules. An *epoch* is one fixed group of engines; a *wave* is one run of it.

1.  Only engines start waves. A stopped engine that receives work runs first and then sends
    `StartWave`. An ingress has no say: its view of the wave may be stale.
2.  The coordinator accepts `StartWave(w)` if w is newer than its own wave, or equal while it sees
    no engine running; then it sends `StartDPWave` to the others.
3.  An engine ignores a start that is older than its own wave. One that is newer than the wave it
    still runs in is remembered: that wave ends, and the next begins at once.
4.  Every step begins with one small all-reduce over the group: how many engines want another
    step, how many vote for a pause. All engines read the same results in the same order, so
    whatever follows from them alone is the same everywhere. With `depth` steps in flight, an
    engine always submits all of them before it reads the oldest; so when it reads a result that
    says "no engine wants a step", every engine has submitted exactly as many steps, and submits
    no more. The steps in flight are then read: if one of them found work, all go on; if none did,
    the wave has ended, with at most `depth` steps without rows.
5.  At the end each engine adds one to its wave, and the group's first sends `WaveComplete(w)`. The
    coordinator accepts it only if it has not moved past w.
6.  A pause is a vote. An engine that receives `Pause` runs and votes until the result is
    unanimous; all then stop behind the same step and send `Paused`. An engine that votes at the
    end of a wave begins the next. Starts are ignored until `Resume`, which lets all of them run
    the same wave again, work or not: so none waits for one that stayed behind. A pause is never
    taken back: `Resume` is sent when all have answered, so no answer and no vote is left over for
    the next one.
7.  A change of the group is a pause, then a new epoch. A death is a new epoch at once: engines
    that are inside a collective abort it. A group that has formed is paused, and begins by
    `Resume` when all have joined. Messages of another epoch are dropped.
8.  A coordinator that takes over does not know what its predecessor has requested. So it changes
    the group, even if the same engines are in it: all that is left over is of an older epoch. It
    requests the pause first, unless a hello says that an engine is paused already or out of its
    group: then others may wait for that engine.
9.  Any message may be lost with its connection; reports reveal it. A command that an engine has
    not followed is sent again: it ignores what it has followed. What a report says about an epoch
    or a wave counts as the message that said so. Not so a pause, which may be an older one: pauses
    of an epoch are numbered, and a paused engine answers its `Pause` again. If it receives a newer
    one, a `Resume` was lost: the others run and wait for it, so it runs and votes.
10. An engine whose group is broken, or is paused for a change, needs a coordinator. While none is
    heard, it may step alone (`standalone_monitor.py`). It keeps its epoch, and is in no group: it
    ignores all but a newer epoch, sends nothing of waves, and reports that it is alone, which says
    `Broken`. So whichever coordinator it hears forms the next group with it, and of several engines
    that are alone each computes only what it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swell.coordinator.wave_interface import (
    WITHOUT_GROUP,
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
    Joined,
    Pause,
    Paused,
    ReconfigureDistributedRequest,
    Resume,
    StartDPWave,
    StartWave,
    WaveComplete,
)


@dataclass
class WaveMember(EngineWaves):
    """The half of an engine that shares collectives with others."""

    start_pending: bool = False
    """A start of the wave after this one was received."""
    finishing: bool = False
    """The last all-reduce result said that no step need follow."""

    @property
    def lockstep(self) -> bool:
        return self.phase is not Phase.ALONE

    @property
    def needs_coordinator(self) -> bool:
        """Peers that have stopped begin the next wave when the coordinator says so."""
        if self.phase is Phase.STOPPED:
            return len(self.ranks) > 1
        return self.phase not in (Phase.RUNNING, Phase.ALONE)

    def may_submit(self) -> bool:
        if self.phase is Phase.ALONE:
            return self.in_flight < self.depth
        return self.phase is Phase.RUNNING and not self.finishing and self.in_flight < self.depth

    def on_all_reduce(self, working: int, pausing: int, has_work: bool) -> list[CoordinatorMessage]:
        self.in_flight -= 1
        if self.phase is Phase.ALONE:
            return []
        agreed = pausing == len(self.ranks)
        self.finishing = agreed or not working
        if not self.finishing or self.in_flight:
            return []
        self.finishing = False
        return self._pause() if agreed else self._complete(has_work)

    def work_arrived(self) -> list[CoordinatorMessage]:
        """A stopped engine runs first, and then reports to the coordinator."""
        return self._begin() if self.phase is Phase.STOPPED else []

    def start(self, message: StartDPWave) -> list[CoordinatorMessage]:
        if message.epoch != self.epoch or message.wave < self.wave:
            return []
        if self.phase is Phase.STOPPED:
            self.phase = Phase.RUNNING
        elif self.phase is Phase.RUNNING:
            self.start_pending |= message.wave > self.wave
        return []

    def pause(self, message: Pause) -> list[CoordinatorMessage]:
        if message.epoch != self.epoch or self.phase in WITHOUT_GROUP | {Phase.ALONE}:
            return []
        if message.number <= self.pause_number and self.phase is Phase.PAUSED:
            return self._paused(message.number)
        if message.number < self.pause_number:
            return []
        self.voting, self.pause_number = True, message.number
        if self.phase is Phase.PAUSED:  # the resume before it was lost
            self.phase = Phase.RUNNING
        return self._begin() if self.phase is Phase.STOPPED else []

    def resume(self, message: Resume) -> list[CoordinatorMessage]:
        if message.epoch == self.epoch and self.phase is Phase.PAUSED:
            self.phase, self.voting = Phase.RUNNING, False
        return []

    def reconfigure(self, message: ReconfigureDistributedRequest) -> bool:
        if message.epoch <= self.epoch:
            return False
        self._leave()
        self.epoch, self.wave, self.ranks = message.epoch, message.wave, tuple(message.ranks)
        if self.rank in self.ranks:
            self.phase = Phase.FORMING
        return True

    def serve_alone(self, epoch: int) -> bool:
        waits = self.phase in WITHOUT_GROUP | {Phase.PAUSED}
        if epoch != self.epoch or not waits or self.rank not in self.ranks:
            return False
        self._leave()
        self.phase = Phase.ALONE
        return True

    def joined(self) -> list[CoordinatorMessage]:
        self.phase = Phase.PAUSED
        return [Joined(self.rank, self.incarnation, self.epoch)]

    def broken(
        self, reason: str, repairing: bool = False, absent: Iterable[int] = ()
    ) -> list[CoordinatorMessage]:
        self._leave()
        ranks = [self.ranks[index] for index in absent]
        return [Broken(self.rank, self.incarnation, self.epoch, reason, repairing, ranks)]

    def _leave(self) -> None:
        self.phase, self.in_flight = Phase.OUT, 0
        self.voting = self.finishing = self.start_pending = False
        self.pause_number = 0

    def _begin(self) -> list[CoordinatorMessage]:
        self.phase = Phase.RUNNING
        return [StartWave(self.rank, self.incarnation, self.epoch, self.wave)]

    def _pause(self) -> list[CoordinatorMessage]:
        self.phase = Phase.PAUSED
        return self._paused(self.pause_number)

    def _paused(self, number: int) -> list[CoordinatorMessage]:
        return [Paused(self.rank, self.incarnation, self.epoch, number)]

    def _complete(self, has_work: bool) -> list[CoordinatorMessage]:
        out: list[CoordinatorMessage] = []
        if self.rank == self.ranks[0]:
            out.append(WaveComplete(self.rank, self.incarnation, self.epoch, self.wave))
        self.wave += 1
        self.phase = Phase.STOPPED
        if has_work or self.voting:
            out += self._begin()
        elif self.start_pending:
            self.phase = Phase.RUNNING
        self.start_pending = False
        return out


@dataclass
class WaveCoordinator(CoordinatorWaves):
    """The coordinator's half for engines that share collectives."""

    inherited: bool = False
    """The group is a predecessor's: what that one requested of it is unknown."""
    pause_number: int = 0
    """Of the newest pause of this epoch."""
    epoch_before: int = 0
    """The newest one of a predecessor that is known: ours come after it."""
    number: int = 0
    """Of this coordinator alone."""

    lockstep = True

    # ---------------------------------------------------------------- messages of engines

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

    def paused(self, rank: int, epoch: int, number: int) -> RankedCommands:
        if (epoch, number) != (self.epoch, self.pause_number):
            return []
        return self._on_acknowledged(rank) if self.group_state is GroupState.PAUSING else []

    def joined(self, rank: int, epoch: int) -> RankedCommands:
        return self._on_acknowledged(rank) if epoch == self.epoch else []

    def broken(self, epoch: int) -> RankedCommands:
        """The engines that are left form the next group."""
        return self._form() if epoch == self.epoch else []

    def report(
        self, rank: int, epoch: int, wave: int, phase: Phase, voting: bool
    ) -> RankedCommands:
        if rank not in self.ranks:
            return []
        if epoch == self.epoch and phase in (Phase.OUT, Phase.ALONE):
            return self.broken(epoch)
        if self.group_state is GroupState.FORMING:
            if epoch < self.epoch:
                return [(rank, self._new_group())]
            return self.joined(rank, epoch) if phase is Phase.PAUSED else []
        if epoch != self.epoch:
            return []
        if self.group_state is GroupState.PAUSING and (phase is Phase.PAUSED or not voting):
            waits = rank not in self.acknowledged
            return [(rank, Pause(epoch, self.pause_number))] if waits else []
        if self.group_state is GroupState.SERVING:
            return self._compare_wave(rank, wave, phase)
        return []

    def _compare_wave(self, rank: int, wave: int, phase: Phase) -> RankedCommands:
        """The engine serves: whether it and the coordinator agree on the wave."""
        match phase:
            case Phase.PAUSED:
                return [(rank, Resume(self.epoch))]
            case Phase.RUNNING:
                return self.start_wave(rank, self.epoch, wave)
            case Phase.STOPPED if wave > self.wave:
                self.wave_complete(self.epoch, wave - 1)
            case Phase.STOPPED if self.running:
                return [(rank, StartDPWave(self.epoch, self.wave))]
        return []

    # ---------------------------------------------------------------- changes that are wanted

    def change(self, target_ranks: tuple[int, ...], lost: bool = False) -> RankedCommands:
        gone = lost and not set(self.ranks) <= set(target_ranks)
        if target_ranks == self.target_ranks and not gone:
            return []
        self.target_ranks = target_ranks
        if gone or not self.ranks or self.group_state is GroupState.PAUSED:
            return self._form()
        return self._request_pause()

    def pause(self) -> RankedCommands:
        self.pause_requested = True
        return self._request_pause()

    def resume(self) -> RankedCommands:
        """A pause that was requested is first agreed: no answer is left over for the next one."""
        self.pause_requested = False
        return self._resume() if self.group_state is GroupState.PAUSED else []

    def recover(self, hellos: Sequence[EngineHello]) -> RankedCommands:
        """The engines form a group: once they have agreed to pause, if all members of the newest
        group step or can begin to; else at once."""
        newest = max(hellos, key=lambda hello: hello.epoch, default=None)
        if newest is None:
            return []
        self.epoch, self.wave = newest.epoch, newest.wave
        newest_pause = max(h.pause_number for h in hellos if h.epoch == self.epoch)
        self.pause_number = max(0, newest_pause - 1)  # the next one repeats it
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

    def introduced(self, rank: int, epoch: int) -> RankedCommands:
        self.epoch_before = max(self.epoch_before, epoch)
        waits = self.group_state is GroupState.FORMING and rank in self.ranks
        return self._form() if waits and epoch >= self.epoch else []

    # ---------------------------------------------------------------- states of the group

    def _request_pause(self) -> RankedCommands:
        if self.group_state is not GroupState.SERVING or not self.ranks:
            return []
        self.group_state, self.acknowledged = GroupState.PAUSING, frozenset()
        self.pause_number += 1
        return [(rank, Pause(self.epoch, self.pause_number)) for rank in self.ranks]

    def _on_acknowledged(self, rank: int) -> RankedCommands:
        self.acknowledged |= {rank}
        if self.acknowledged != set(self.ranks):
            return []
        if self.target_ranks != self.ranks or self.inherited:
            return self._form()
        if self.pause_requested:
            self.group_state = GroupState.PAUSED
            return []
        return self._resume()

    def _form(self) -> RankedCommands:
        """The next epoch, of the target ranks. The others are sent it too: they have left."""
        addressed = sorted({*self.ranks, *self.target_ranks})
        self.epoch = max(self.epoch, self.epoch_before) + 1
        self.wave, self.running = self.wave + 1, False
        self.ranks, self.acknowledged, self.inherited = self.target_ranks, frozenset(), False
        self.group_state = GroupState.FORMING if self.ranks else GroupState.SERVING
        self.pause_number = 0
        return [(rank, self._new_group()) for rank in addressed]

    def _new_group(self) -> ReconfigureDistributedRequest:
        return ReconfigureDistributedRequest(
            self.epoch, list(self.ranks), self.wave, coordinator=self.number
        )

    def _resume(self) -> RankedCommands:
        self.group_state, self.running = GroupState.SERVING, True
        return [(rank, Resume(self.epoch)) for rank in self.ranks]
