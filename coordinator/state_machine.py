"""What the coordinator decides, pure: the members, the group that steps together, the stalled.

    messages of engines  --> waves (which engines step)   --\\
    calls of the manager --> roster (the members)         ---> commands to engines,
    time                 --> engine monitor (the stalled) --/   views to ingresses

An engine that shares experts is in the roster from the moment that its group has formed, until a
group without it has: ingresses never send to one that could not serve. An engine that died or
stalled is taken out at once. One that replaces a worker stays, marked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from swell.configs.schema import ClusterConfig
from swell.coordinator import roster as rosters
from swell.coordinator.cluster_state import ClusterState
from swell.coordinator.engine_monitor import EngineMonitor, StalledEngine
from swell.coordinator.roster import Member, MemberState, Roster
from swell.coordinator.wave_interface import CoordinatorWaves, GroupState, Phase, RankedCommands
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

EngineEvent = EngineReport | StartWave | WaveComplete | Paused | Joined | Broken | Repaired


class CoordinatorStateMachine:
    """All that is known of a cluster. Every method returns the commands that follow."""

    def __init__(self, config: ClusterConfig, waves: CoordinatorWaves, now: float) -> None:
        self.cluster_state = ClusterState(config, now)
        self.waves = waves
        self.stalled_engines: list[StalledEngine] = []
        """Engines that were found to have stalled; the manager ends their processes."""
        self.commit_s = 0.0
        """How long the last change kept the group from stepping."""
        self.phase = "idle"
        """Of the manager's change of engines, as it reported."""
        self._engine_monitor = EngineMonitor(config.stall_timeout_s, now)
        self._joining: dict[int, Member] = {}
        """Engines that join as soon as their group has formed."""
        self._stopped_at: float | None = None

    @property
    def roster(self) -> Roster:
        return self.cluster_state.roster

    @property
    def is_stable(self) -> bool:
        """No change of the group is under way."""
        waves = self.waves
        return (
            waves.group_state in (GroupState.SERVING, GroupState.PAUSED)
            and waves.ranks == waves.target_ranks
        )

    @property
    def joining(self) -> set[int]:
        """Ranks that wait for their group."""
        return set(self._joining)

    def current_member(self, rank: int) -> Member | None:
        """The engine of this rank to which commands go."""
        return self._joining.get(rank) or self.roster.find(rank)

    def member(self, rank: int, incarnation: int) -> Member | None:
        """The engine of this incarnation, if it is in the roster or joins."""
        joining = self._joining.get(rank)
        if joining is not None and joining.incarnation == incarnation:
            return joining
        return self.roster.find(rank, incarnation)

    def view(self) -> ClusterView:
        return msgspec.structs.replace(
            self.cluster_state.view(),
            wave=self.waves.wave,
            state=str(self.waves.group_state),
            stalls=len(self.stalled_engines),
            commit_s=self.commit_s,
            phase=self.phase,
        )

    # ---------------------------------------------------------------- messages of engines

    def on_message(self, message: EngineEvent, now: float) -> RankedCommands:
        """Messages of engines that are unknown, or were removed, are dropped."""
        member = self.member(message.rank, message.incarnation)
        if member is None:
            return []
        match message:
            case EngineReport():
                self.cluster_state.report(message, now)
                self._engine_monitor.on_report(message, now)
                sends = self.waves.report(
                    message.rank,
                    message.epoch,
                    message.wave,
                    Phase(message.wave_phase),
                    message.pausing,
                )
            case StartWave():
                sends = self.waves.start_wave(message.rank, message.epoch, message.wave)
            case WaveComplete():
                self.waves.wave_complete(message.epoch, message.wave)
                sends = []
            case Paused():
                sends = self.waves.paused(message.rank, message.epoch)
            case Joined():
                sends = self.waves.joined(message.rank, message.epoch)
            case Broken():
                sends = self._broken(member, message, now)
            case Repaired():
                sends = self._repaired(member, message, now)
        return self._sync_roster(sends, now)

    def _broken(self, member: Member, message: Broken, now: float) -> RankedCommands:
        if not message.repairing:
            return self.waves.broken(message.epoch)
        if member.state is MemberState.ACTIVE:
            self._update_member(member.rank, now, state=MemberState.REPAIRING)
        return self.waves.change(self._without({member.rank}), lost=True)

    def _repaired(self, member: Member, message: Repaired, now: float) -> RankedCommands:
        self._update_member(member.rank, now, store=message.store)
        return self.waves.change(self._with({member.rank}))

    # ---------------------------------------------------------------- calls of the manager

    def join(self, members: Iterable[Member], now: float) -> RankedCommands:
        """Engines are ready; one that is a member already stays. A taken rank is a ValueError."""
        newcomers = [m for m in members if self.member(m.rank, m.incarnation) is None]
        rosters.join(self.roster, newcomers)  # raises
        self._joining.update({member.rank: member for member in newcomers})
        self._sync_monitor(now)
        return self._sync_roster(self.waves.change(self._with(self._joining)), now)

    def leave(self, ranks: Iterable[int], now: float) -> RankedCommands:
        """These engines get no more requests."""
        self.cluster_state.change(lambda roster: rosters.leave(roster, ranks), now)
        return []

    def cancel_leave(self, ranks: Iterable[int], now: float) -> RankedCommands:
        """These engines were leaving, and are active again."""
        self.cluster_state.change(lambda roster: rosters.cancel_leave(roster, ranks), now)
        return []

    def detach(self, ranks: Iterable[int], now: float) -> RankedCommands:
        """These engines live, and go: their group goes on without them, then the roster does."""
        return self._sync_roster(self.waves.change(self._without(set(ranks))), now)

    def remove_failed(self, ranks: Iterable[int], now: float) -> RankedCommands:
        """These engines died: they leave the roster at once."""
        gone = set(ranks)
        for rank in gone:
            self._joining.pop(rank, None)
        self.cluster_state.change(lambda roster: rosters.remove(roster, gone), now)
        self._sync_monitor(now)
        return self._sync_roster(self.waves.change(self._without(gone), lost=True), now)

    def pause(self, now: float) -> RankedCommands:
        return self._sync_roster(self.waves.pause(), now)

    def resume(self, now: float) -> RankedCommands:
        return self._sync_roster(self.waves.resume(), now)

    # ---------------------------------------------------------------- time passes

    def tick(self, now: float) -> RankedCommands:
        """Remove engines that have stalled."""
        ranks = frozenset({*self.roster.ranks, *self._joining})
        exempt = ranks if self.waves.group_state is not GroupState.SERVING else self._repairing()
        sends: RankedCommands = []
        for stalled in self._engine_monitor.check(now, exempt):
            self.stalled_engines.append(stalled)
            sends += self.remove_failed([stalled.rank], now)
        return sends

    def recover(self, epoch: int, hellos: Sequence[EngineHello], now: float) -> RankedCommands:
        """Take over the engines that an earlier coordinator left; `epoch` is the newest of
        the roster that any ingress has seen."""
        members = tuple(sorted((hello.member for hello in hellos), key=lambda m: m.rank))
        recovered = Roster(epoch + 1, members)
        self.cluster_state.change(lambda _roster: recovered, now)
        self._sync_monitor(now)
        return self._sync_roster(self.waves.recover(hellos), now)

    def advance_epoch(self, epoch: int, now: float) -> None:
        """An ingress has seen this epoch of a predecessor: ours comes after it."""
        if epoch > self.roster.epoch:
            self.cluster_state.change(lambda roster: Roster(epoch + 1, roster.members), now)

    # ---------------------------------------------------------------- inside

    def _sync_roster(self, sends: RankedCommands, now: float) -> RankedCommands:
        """Let the roster follow the group, and complete the commands."""
        waves = self.waves
        if waves.group_state is GroupState.FORMING and self._stopped_at is None:
            self._stopped_at = now
        if waves.group_state is GroupState.SERVING and self._stopped_at is not None:
            self.commit_s, self._stopped_at = now - self._stopped_at, None
        if self.is_stable:
            self._commit_group(now)
        return [(rank, self._with_store(command)) for rank, command in sends]

    def _commit_group(self, now: float) -> None:
        """The group has formed: newcomers join, the detached leave, the repaired are active."""
        group = set(self.waves.ranks)
        arrived = [self._joining.pop(rank) for rank in list(self._joining) if rank in group]
        stays = group | self._repairing()

        def step(roster: Roster) -> Roster:
            roster = rosters.join(roster, arrived) if arrived else roster
            roster = rosters.remove(roster, set(roster.ranks) - stays)
            repaired = [
                m.rank
                for m in roster.members
                if m.state is MemberState.REPAIRING and m.rank in group
            ]
            return rosters.update_members(roster, repaired, state=MemberState.ACTIVE)

        self.cluster_state.change(step, now)
        self._sync_monitor(now)

    def _update_member(self, rank: int, now: float, **changes: object) -> None:
        if rank in self._joining:
            self._joining[rank] = msgspec.structs.replace(self._joining[rank], **changes)
        self.cluster_state.change(
            lambda roster: rosters.update_members(roster, [rank], **changes), now
        )

    def _with_store(self, command: EngineCommand) -> EngineCommand:
        """Workers of several engines meet at the store of the first."""
        if not isinstance(command, ReconfigureDistributedRequest) or len(command.ranks) < 2:
            return command
        first = self.current_member(command.ranks[0])
        assert first is not None
        return msgspec.structs.replace(command, store=first.store)

    def _with(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(sorted({*self.waves.target_ranks, *ranks}))

    def _without(self, ranks: set[int]) -> tuple[int, ...]:
        return tuple(rank for rank in self.waves.target_ranks if rank not in ranks)

    def _repairing(self) -> frozenset[int]:
        return frozenset(m.rank for m in self.roster.members if m.state is MemberState.REPAIRING)

    def _sync_monitor(self, now: float) -> None:
        self._engine_monitor.set_ranks({*self.roster.ranks, *self._joining}, now)
