"""Waves: engines that share collectives step in lockstep, and stop together.

While any engine of a group has work, all engines step, the idle ones without rows; then all stop.
The two halves, for engines and for the coordinator, implement the interfaces in
`wave_interface.py`.

The rules. An *epoch* is one fixed group of engines; a *wave* is one period of steps of that group.

1.  Only engines start waves. A stopped engine that receives work runs first and then sends
    `StartWave`. Ingresses never start waves, because their view of the wave may be stale.
2.  The coordinator accepts `StartWave(w)` if w is newer than its own wave, or equal while it knows
    of no running engine. Then it sends `StartDPWave` to the other engines.
3.  An engine ignores a start that is older than its own wave. If a start is newer than the wave
    in which the engine still runs, the engine starts the next wave as soon as this one completes.
4.  Every step begins with one small all-reduce over the group: how many engines want another
    step, and how many vote for a pause. All engines read the same results in the same order, so
    everything that depends only on these results is the same on all engines. With `depth` steps
    in flight, an engine always submits all of them before it reads the oldest. So when it reads a
    result that says "no engine wants a step", every engine has submitted exactly the same number
    of steps, and submits no more. The steps in flight are then read: if one of them found work,
    all engines continue; if none did, the wave is complete, after at most `depth` steps without
    rows.
5.  When a wave completes, each engine increments its wave, and the first engine of the group sends
    `WaveComplete(w)`. The coordinator accepts it only if its own wave is not newer than w.
6.  A pause is a vote. An engine that receives `Pause` runs and votes until the result is
    unanimous. Then all engines stop after the same step and send `Paused`. If an engine still
    votes when a wave completes, it starts the next one. Starts are ignored until `Resume`, after
    which all engines run the same wave again, with or without work, so that none waits for one
    that did not resume. A pause is never cancelled: `Resume` is sent after all have answered, so
    no old answer or vote can be mistaken for one of the next pause.
7.  A change of the group is a pause, then a new epoch. If an engine dies, the new epoch begins at
    once: engines that are inside a collective abort it. A group that has formed is paused, and
    starts with `Resume` when all engines have joined. Messages of another epoch are dropped.
8.  A coordinator that takes over does not know its predecessor's requests. So it changes the
    group, even if the engines are the same: then all older messages belong to an older epoch. It
    requests the pause first, unless a hello says that an engine is already paused or out of its
    group: then the others may be waiting for that engine.
9.  Any message may be lost with its connection; reports reveal the loss. A command that an engine
    has not executed is sent again; an engine ignores a command that it has executed. If a report
    implies an epoch or a wave, it counts like the lost message. This does not hold for a pause,
    which may be an older one: the pauses of an epoch are numbered, and a paused engine answers
    its `Pause` again. If it receives a newer `Pause`, a `Resume` was lost: the others run and
    wait for it, so it runs and votes. The report of an engine that was removed is answered
    with the command to leave its group: it may have missed that the others have left it.
10. An engine whose group is broken, or is paused for a change, needs a coordinator. If there is no
    coordinator, the engine may step by itself (`standalone_monitor.py`). It keeps its epoch but is
    in no group: it ignores everything except a newer epoch, sends no messages about waves, and its
    reports have the phase `STANDALONE`, which counts like `Broken`. So the next coordinator forms a
    group with it, and each of several standalone engines computes only its own requests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from swell.coordinator.wave_protocol.wave_interface import (
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
    """The engine's half for engines that share collectives."""

    start_pending: bool = False
    """Whether a start of the next wave was received."""
    finishing: bool = False
    """Whether the last all-reduce result required no further step."""

    @property
    def lockstep(self) -> bool:
        return self.phase is not Phase.STANDALONE

    @property
    def needs_coordinator(self) -> bool:
        """Whether the engine waits for the coordinator: stopped peers start the next wave on its
        command."""
        if self.phase is Phase.STOPPED:
            return len(self.ranks) > 1
        return self.phase not in (Phase.RUNNING, Phase.STANDALONE)

    def may_submit(self) -> bool:
        if self.phase is Phase.STANDALONE:
            return self.in_flight < self.depth
        return self.phase is Phase.RUNNING and not self.finishing and self.in_flight < self.depth

    def on_all_reduce(self, working: int, pausing: int, has_work: bool) -> list[CoordinatorMessage]:
        self.in_flight -= 1
        if self.phase is Phase.STANDALONE:
            return []
        agreed = pausing == len(self.ranks)
        self.finishing = agreed or not working
        if not self.finishing or self.in_flight:
            return []
        self.finishing = False
        return self._pause() if agreed else self._complete(has_work)

    def work_arrived(self) -> list[CoordinatorMessage]:
        """Starts a wave if the engine is stopped: the engine runs first, and then reports it."""
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
        if message.epoch != self.epoch or self.phase in WITHOUT_GROUP | {Phase.STANDALONE}:
            return []
        if message.number <= self.pause_number and self.phase is Phase.PAUSED:
            return self._paused(message.number)
        if message.number < self.pause_number:
            return []
        self.voting, self.pause_number = True, message.number
        if self.phase is Phase.PAUSED:  # the last `Resume` was lost
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

    def serve_standalone(self, epoch: int) -> bool:
        waits = self.phase in WITHOUT_GROUP | {Phase.PAUSED}
        if epoch != self.epoch or not waits or self.rank not in self.ranks:
            return False
        self._leave()
        self.phase = Phase.STANDALONE
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
    """Whether the group was formed by a predecessor, whose requests to it are unknown."""
    pause_number: int = 0
    """Number of the newest pause of this epoch."""
    epoch_before: int = 0
    """The newest known epoch of a predecessor; new epochs are greater."""
    number: int = 0
    """Random number that identifies this coordinator."""

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
        """Forms the next group from the remaining engines."""
        return self._form() if epoch == self.epoch else []

    def report(
        self, rank: int, epoch: int, wave: int, phase: Phase, voting: bool
    ) -> RankedCommands:
        if rank not in self.ranks:
            return []
        if epoch == self.epoch and phase in (Phase.OUT, Phase.STANDALONE):
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

    def left_out(self, epoch: int, phase: Phase) -> ReconfigureDistributedRequest | None:
        if not 0 < epoch < self.epoch or phase is Phase.STANDALONE:
            return None
        return replace(self._new_group(), ranks=[])

    def _compare_wave(self, rank: int, wave: int, phase: Phase) -> RankedCommands:
        """Resolves a difference between the wave of a serving engine and the coordinator's wave."""
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

    # ---------------------------------------------------------------- requested changes

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
        """Resumes the group. A pause in progress is completed first, so that no old answer counts
        for the next one."""
        self.pause_requested = False
        return self._resume() if self.group_state is GroupState.PAUSED else []

    def recover(self, hellos: Sequence[EngineHello]) -> RankedCommands:
        """Forms a group of these engines: after a pause, if all members of the newest group step or
        can start to; otherwise at once."""
        newest = max(hellos, key=lambda hello: hello.epoch, default=None)
        if newest is None:
            return []
        self.epoch, self.wave = newest.epoch, newest.wave
        newest_pause = max(h.pause_number for h in hellos if h.epoch == self.epoch)
        self.pause_number = max(0, newest_pause - 1)  # the next pause repeats this number
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
        """Starts the next epoch with the target ranks. Ranks that are no longer in it are told,
        too."""
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
