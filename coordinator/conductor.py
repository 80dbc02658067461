"""What the coordinator decides, pure: who is here, who steps with whom, who has stopped.

    engines' words --> waves (who steps)     --\\
    the manager    --> roster (who is here)  ---> commands to engines, views to ingresses
    time           --> liveness (who stopped) --/

An engine that shares experts is in the roster from the moment that its group has formed, until a
group without it has: ingresses never send to one that could not serve. An engine that died or
stopped is taken out at once. One that replaces a worker stays, marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from swell.configs.schema import ClusterConfig
from swell.coordinator import roster as rosters
from swell.coordinator.board import Board
from swell.coordinator.liveness import Liveness, Verdict
from swell.coordinator.pauses import NullCoordinator
from swell.coordinator.roster import Member, MemberState, Roster
from swell.coordinator.waves import Phase, Sends, Stage, WaveCoordinator
from swell.coordinator.wire import (
    Broken,
    ClusterView,
    EngineCommand,
    EngineHello,
    EngineReport,
    Joined,
    Paused,
    ReconfigureDistributedRequest,
    Repaired,
    StartWave,
    WaveComplete,
)

EngineWord = EngineReport | StartWave | WaveComplete | Paused | Joined | Broken | Repaired


class Conductor:
    """All that is known of a cluster. Every method returns the commands that follow."""

    def __init__(
        self, config: ClusterConfig, waves: WaveCoordinator | NullCoordinator, now: float
    ) -> None:
        self.board = Board(config, now)
        self.waves = waves
        self.verdicts: list[Verdict] = []
        """Engines that were found to have stopped, for whoever ends their processes."""
        self.commit_s = 0.0
        """How long the last change kept the group from stepping."""
        self.phase = "idle"
        """Of the manager's change, as it told."""
        self._liveness = Liveness(config.stall_timeout_s, now)
        self._coming: dict[int, Member] = {}
        """Engines that join as soon as their group has formed."""
        self._stopped_at: float | None = None

    @property
    def roster(self) -> Roster:
        return self.board.roster

    @property
    def settled(self) -> bool:
        """No change of the group is under way."""
        waves = self.waves
        return waves.stage in (Stage.SERVING, Stage.PAUSED) and waves.ranks == waves.wanted

    @property
    def coming(self) -> set[int]:
        """Ranks that wait for their group."""
        return set(self._coming)

    def newest(self, rank: int) -> Member | None:
        """The engine of this rank that commands are for."""
        return self._coming.get(rank) or self.roster.find(rank)

    def member(self, rank: int, incarnation: int) -> Member | None:
        """Who speaks, if it is one of us."""
        coming = self._coming.get(rank)
        if coming is not None and coming.incarnation == incarnation:
            return coming
        return self.roster.find(rank, incarnation)

    def view(self) -> ClusterView:
        return msgspec.structs.replace(
            self.board.view(),
            wave=self.waves.wave,
            state=str(self.waves.stage),
            stalls=len(self.verdicts),
            commit_s=self.commit_s,
            phase=self.phase,
        )

    # ---------------------------------------------------------------- engines speak

    def hear(self, word: EngineWord, now: float) -> Sends:
        """Take in what an engine says. Strangers, and the dead, are not heard."""
        member = self.member(word.rank, word.incarnation)
        if member is None:
            return []
        match word:
            case EngineReport():
                self.board.report(word, now)
                self._liveness.hear(word, now)
                sends = self.waves.report(
                    word.rank, word.epoch, word.wave, Phase(word.wave_phase), word.pausing
                )
            case StartWave():
                sends = self.waves.start_wave(word.rank, word.epoch, word.wave)
            case WaveComplete():
                self.waves.wave_complete(word.epoch, word.wave)
                sends = []
            case Paused():
                sends = self.waves.paused(word.rank, word.epoch)
            case Joined():
                sends = self.waves.joined(word.rank, word.epoch)
            case Broken():
                sends = self._broken(member, word, now)
            case Repaired():
                sends = self._repaired(member, word, now)
        return self._settle(sends, now)

    def _broken(self, member: Member, word: Broken, now: float) -> Sends:
        if not word.repairing:
            return self.waves.broken(word.epoch)
        if member.state is MemberState.ACTIVE:
            self._amend(member.rank, now, state=MemberState.REPAIRING)
        return self.waves.change(self._without({member.rank}), lost=True)

    def _repaired(self, member: Member, word: Repaired, now: float) -> Sends:
        self._amend(member.rank, now, store=word.store)
        return self.waves.change(self._with({member.rank}))

    # ---------------------------------------------------------------- the manager speaks

    def join(self, members: Iterable[Member], now: float) -> Sends:
        """Engines are ready. A rank that is taken is a ValueError; who is here already stays."""
        newcomers = [m for m in members if self.member(m.rank, m.incarnation) is None]
        rosters.join(self.roster, newcomers)  # raises
        self._coming.update({member.rank: member for member in newcomers})
        self._follow(now)
        return self._settle(self.waves.change(self._with(self._coming)), now)

    def leave(self, ranks: Iterable[int], now: float) -> Sends:
        """They get no more requests."""
        self.board.change(lambda roster: rosters.leave(roster, ranks), now)
        return []

    def stay(self, ranks: Iterable[int], now: float) -> Sends:
        """They were leaving, and are wanted again."""
        self.board.change(lambda roster: rosters.stay(roster, ranks), now)
        return []

    def part(self, ranks: Iterable[int], now: float) -> Sends:
        """They live, and go: their group goes on without them, then they leave the roster."""
        return self._settle(self.waves.change(self._without(set(ranks))), now)

    def lose(self, ranks: Iterable[int], now: float) -> Sends:
        """They died: they leave the roster at once."""
        gone = set(ranks)
        for rank in gone:
            self._coming.pop(rank, None)
        self.board.change(lambda roster: rosters.remove(roster, gone), now)
        self._follow(now)
        return self._settle(self.waves.change(self._without(gone), lost=True), now)

    def hold(self, now: float) -> Sends:
        return self._settle(self.waves.hold(), now)

    def release(self, now: float) -> Sends:
        return self._settle(self.waves.release(), now)

    # ---------------------------------------------------------------- time passes

    def tick(self, now: float) -> Sends:
        """Look who has stopped."""
        ranks = frozenset({*self.roster.ranks, *self._coming})
        excused = ranks if self.waves.stage is not Stage.SERVING else self._repairing()
        sends: Sends = []
        for verdict in self._liveness.look(now, excused):
            self.verdicts.append(verdict)
            sends += self.lose([verdict.rank], now)
        return sends

    def recover(self, epoch: int, hellos: Sequence[EngineHello], now: float) -> Sends:
        """Take over the engines that an earlier coordinator left; `epoch` is the newest that
        anybody has seen of the roster."""
        members = tuple(sorted((hello.member for hello in hellos), key=lambda m: m.rank))
        recovered = Roster(epoch + 1, members)
        self.board.change(lambda _roster: recovered, now)
        self._follow(now)
        return self._settle(self.waves.recover(hellos), now)

    def outrun(self, epoch: int, now: float) -> None:
        """Somebody has seen this epoch of a predecessor: ours comes after it."""
        if epoch > self.roster.epoch:
            self.board.change(lambda roster: Roster(epoch + 1, roster.members), now)

    # ---------------------------------------------------------------- inside

    def _settle(self, sends: Sends, now: float) -> Sends:
        """Let the roster follow the group, and complete the commands."""
        waves = self.waves
        if waves.stage is Stage.FORMING and self._stopped_at is None:
            self._stopped_at = now
        if waves.stage is Stage.SERVING and self._stopped_at is not None:
            self.commit_s, self._stopped_at = now - self._stopped_at, None
        if self.settled:
            self._admit(now)
        return [(rank, self._with_store(command)) for rank, command in sends]

    def _admit(self, now: float) -> None:
        """The group has formed: newcomers in, those that parted out, the repaired active."""
        group = set(self.waves.ranks)
        arrived = [self._coming.pop(rank) for rank in list(self._coming) if rank in group]
        stays = group | self._repairing()

        def step(roster: Roster) -> Roster:
            roster = rosters.join(roster, arrived) if arrived else roster
            roster = rosters.remove(roster, set(roster.ranks) - stays)
            mended = [
                m.rank
                for m in roster.members
                if m.state is MemberState.REPAIRING and m.rank in group
            ]
            return rosters.amend(roster, mended, state=MemberState.ACTIVE)

        self.board.change(step, now)
        self._follow(now)

    def _amend(self, rank: int, now: float, **changes: object) -> None:
        if rank in self._coming:
            self._coming[rank] = msgspec.structs.replace(self._coming[rank], **changes)
        self.board.change(lambda roster: rosters.amend(roster, [rank], **changes), now)

    def _with_store(self, command: EngineCommand) -> EngineCommand:
        """Workers of several engines meet at the first one's."""
        if not isinstance(command, ReconfigureDistributedRequest) or len(command.ranks) < 2:
            return command
        first = self.newest(command.ranks[0])
        assert first is not None
        return msgspec.structs.replace(command, store=first.store)

    def _with(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({*self.waves.wanted, *ranks}))

    def _without(self, ranks: set[int]) -> tuple[int, ...]:
        return tuple(rank for rank in self.waves.wanted if rank not in ranks)

    def _repairing(self) -> frozenset[int]:
        return frozenset(m.rank for m in self.roster.members if m.state is MemberState.REPAIRING)

    def _follow(self, now: float) -> None:
        self._liveness.follow({*self.roster.ranks, *self._coming}, now)
