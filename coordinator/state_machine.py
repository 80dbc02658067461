"""What the coordinator decides, pure: the members, the group that steps together, the stalled.

    messages of engines  --> waves (which engines step)   --\\
    calls of the manager --> roster (the members)         ---> commands to engines,
    time                 --> engine monitor (the stalled) --/   views to ingresses

An engine that shares experts is in the roster from the moment that its group has formed, until a
group without it has: ingresses never send to one that could not serve. An engine that died or
stalled is taken out at once. One that replaces a worker stays, marked.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import msgspec

from swell.configs.schema import ClusterConfig
from swell.coordinator import roster as rosters
from swell.coordinator.cluster_state import ClusterState
from swell.coordinator.engine_monitor import STUCK_FACTOR, EngineMonitor, StalledEngine
from swell.coordinator.forming_monitor import FormingMonitor, Remedy
from swell.coordinator.forming_reasons import named, not_followed, not_formed, not_joined
from swell.coordinator.manager_state import ManagerState
from swell.coordinator.roster import Member, MemberState, Roster
from swell.coordinator.wave_interface import CoordinatorWaves, GroupState, Phase, RankedCommands
from swell.coordinator.wire import (
    Broken,
    ClusterReports,
    ClusterView,
    EngineCommand,
    EngineHello,
    EngineLoads,
    EngineReport,
    Introduce,
    Joined,
    Paused,
    Publication,
    ReconfigureDistributedRequest,
    Repaired,
    StartWave,
    WaveComplete,
)


class JoinResult(msgspec.Struct, frozen=True):
    """What became of engines that were to join."""

    roster: Roster
    refused: dict[int, str] = {}
    """Ranks that did not join, and why; the others are in the roster."""


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
        self.manager_state = ManagerState()
        self._engine_monitor = EngineMonitor(config.stall_timeout_s, now)
        self._forming_monitor = FormingMonitor(STUCK_FACTOR * config.stall_timeout_s, now)
        self._joining: dict[int, Member] = {}
        """Engines that join as soon as their group has formed."""
        self._repairs: dict[int, int] = {}
        """How often each rank's engine had replaced workers when it served last."""
        self._introducing: set[int] = set()
        """Engines that shall send their new workers: they have not reported that they are back."""
        self.detached: set[int] = set()
        """Engines of the roster that are to go: their group goes on without them."""
        self.called_off: dict[int, str] = {}
        """Newcomers that stalled, or without which the group went on, and why; until they join
        again."""
        self._broken_reason = ""
        """Why the group failed to form last."""
        self._stopped_at: float | None = None
        self._committed: tuple[tuple[int, ...], Roster] | None = None
        """The group that the roster follows, and that roster; None: one of them changes."""
        self._published: tuple[object, ...] = ()
        """Of the newest view that was published, what is not about one engine."""

    @property
    def roster(self) -> Roster:
        return self.cluster_state.roster

    @property
    def is_stable(self) -> bool:
        """No change of the group is under way."""
        waves = self.waves
        return waves.group_state in (GroupState.SERVING, GroupState.PAUSED) and (
            waves.ranks is waves.target_ranks or waves.ranks == waves.target_ranks
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
        status = self._status
        return msgspec.structs.replace(self.cluster_state.view(), wave=self.waves.wave, **status)

    @property
    def _status(self) -> dict[str, object]:
        """Of a view, what is neither about one engine nor the wave."""
        return {
            "state": self.waves.group_state.value,
            "stalls": len(self.stalled_engines),
            "commit_s": self.commit_s,
            **self.manager_state.of_view,
        }

    def publication(self, now: float) -> Publication | None:
        """What it is time to publish. What is not about one engine goes with all reports."""
        stalls = len(self.stalled_engines)
        status = self.waves.group_state, stalls, self.commit_s, self.manager_state
        due = self.cluster_state.due(now, has_news=status != self._published)
        if due is None or isinstance(due, EngineLoads):
            return due
        self._published, view = status, self.view()
        return view if isinstance(due, ClusterView) else ClusterReports.of(view)

    # ---------------------------------------------------------------- messages of engines

    def on_message(self, message: EngineEvent, now: float) -> RankedCommands:
        """Messages of engines that are unknown, or were removed, are dropped."""
        member = self.member(message.rank, message.incarnation)
        if member is None:
            return []
        match message:
            case EngineReport():
                self.cluster_state.report(message, now)
                is_stepping = self.waves.lockstep and message.wave_phase == Phase.RUNNING
                self._engine_monitor.on_report(message, now, is_stepping)
                self._forming_monitor.on_report(message)
                sends = self.waves.report(
                    message.rank,
                    message.epoch,
                    message.wave,
                    Phase(message.wave_phase),
                    message.pausing,
                )
                sends += self._check_repairs(member, message.repairs)
            case StartWave():
                sends = self.waves.start_wave(message.rank, message.epoch, message.wave)
            case WaveComplete():
                self.waves.wave_complete(message.epoch, message.wave)
                sends = []
            case Paused():
                sends = self.waves.paused(message.rank, message.epoch, message.number)
            case Joined():
                sends = self.waves.joined(message.rank, message.epoch)
            case Broken():
                sends = self._broken(member, message, now)
            case Repaired():
                sends = self._repaired(member, message, now)
        return self._sync_roster(sends, now)

    def _broken(self, member: Member, message: Broken, now: float) -> RankedCommands:
        self._forming_monitor.on_broken(message)
        if not message.repairing:
            if message.epoch == self.waves.epoch or message.absent:
                self._broken_reason = f"{named(member)}: {message.reason}"
            return self.waves.broken(message.epoch)
        if member.state is not (state := MemberState.REPAIRING):
            leaves = member.state is MemberState.LEAVING
            self._update_member(member.rank, now, state=state, leaves=leaves)
        return self.waves.change(self._without({member.rank}), lost=True)

    def _repaired(self, member: Member, message: Repaired, now: float) -> RankedCommands:
        self._update_member(member.rank, now, store=message.store)
        return self.waves.change(self._with({member.rank} - self.detached))

    def _check_repairs(self, member: Member, repairs: int) -> RankedCommands:
        """An engine whose `Repaired` was lost says in its reports that it has new workers."""
        rank = member.rank
        if member.state is not MemberState.REPAIRING:
            self._repairs[rank] = repairs
            self._introducing.discard(rank)
        elif repairs > self._repairs.get(rank, 0) and rank not in self.waves.target_ranks:
            self._introducing.add(rank)
            return [(rank, Introduce())]
        return []

    # ---------------------------------------------------------------- calls of the manager

    def join(
        self, members: Iterable[Member], now: float, heard: Container[int] = ()
    ) -> RankedCommands:
        """Engines are ready; one that is a member already stays. A taken rank is a ValueError.
        `heard`: incarnations that have introduced themselves to this coordinator."""
        newcomers = [m for m in members if self.member(m.rank, m.incarnation) is None]
        rosters.join(self.roster, newcomers)  # raises
        self._joining.update({member.rank: member for member in newcomers})
        for member in newcomers:
            self.called_off.pop(member.rank, None)
        self._sync_monitor(now)
        self._engine_monitor.on_hellos([m.rank for m in newcomers if m.incarnation in heard], now)
        return self._sync_roster(self.waves.change(self._with(self._joining)), now)

    def finish_join(self, ranks: set[int], timeout_s: float) -> JoinResult:
        """What has become of these engines by now; those that are not in the roster are to be
        removed. `timeout_s`: the time that they had."""
        refused = {
            rank: self.called_off.get(rank) or not_joined(rank, timeout_s, rank in self._joining)
            for rank in sorted(ranks.difference(self.roster.ranks))
        }
        return JoinResult(self.roster, refused)

    def leave(self, ranks: Iterable[int], now: float) -> RankedCommands:
        """These engines get no more requests."""
        self.cluster_state.change(lambda roster: rosters.leave(roster, ranks), now)
        return []

    def cancel_leave(self, ranks: Iterable[int], now: float) -> RankedCommands:
        """These engines were leaving, and are active again."""
        self.cluster_state.change(lambda roster: rosters.cancel_leave(roster, ranks), now)
        back = self.detached & set(ranks)
        self.detached -= back
        return self._sync_roster(self.waves.change(self._with(back)), now)

    def detach(self, ranks: Iterable[int], now: float) -> RankedCommands:
        """These engines live, and go: their group goes on without them, then the roster does."""
        self.detached |= set(ranks).intersection(self.roster.ranks)
        self._committed = None  # perhaps they are in no group
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
        """Remove engines that have stalled, and let no group form for ever."""
        sends: RankedCommands = []
        may_rest = frozenset({*self.roster.ranks, *self._joining}) - self.waves.stepping
        for stalled in self._engine_monitor.check(now, may_rest):
            if self.current_member(stalled.rank) is not None:  # it has not gone with another one
                sends += self._remove_stalled(stalled, now)
        return [*sends, *self._check_forming(now)]

    def _remove_stalled(self, stalled: StalledEngine, now: float) -> RankedCommands:
        self.stalled_engines.append(stalled)
        if stalled.rank in self._joining:
            self.called_off[stalled.rank] = stalled.reason
        return self.remove_failed([stalled.rank], now)

    def _check_forming(self, now: float) -> RankedCommands:
        """End what is in the way of a group that does not form."""
        waves = self.waves
        failure = self._forming_monitor.check(waves, self._joining.keys(), now)
        sends: RankedCommands = []
        match failure.remedy:
            case Remedy.REMOVE:
                for rank in sorted(failure.ranks):
                    member = self.current_member(rank)
                    reason = not_followed(rank, member, waves.epoch, failure.waited_s)
                    sends += self._remove_stalled(StalledEngine(rank, reason), now)
            case Remedy.CALL_OFF:
                for rank in sorted(failure.ranks):
                    newcomer = self._joining.pop(rank)
                    found = map(self.current_member, failure.unreached_by.get(rank, ()))
                    peers = [peer for peer in found if peer is not None]
                    self.called_off[rank] = not_formed(
                        newcomer, failure.waited_s, peers, self._broken_reason
                    )
                self._sync_monitor(now)
                remaining = self._without(set(failure.ranks))
                sends += self._sync_roster(waves.change(remaining, lost=True), now)
            case Remedy.FORM_AGAIN:
                sends += self._sync_roster(waves.broken(waves.epoch), now)
        return sends

    def recover(self, epoch: int, hellos: Sequence[EngineHello], now: float) -> RankedCommands:
        """Take over the engines that an earlier coordinator left; `epoch` is the newest of
        the roster that any ingress has seen."""
        self.cluster_state.change(lambda _: rosters.of(epoch + 1, (h.member for h in hellos)), now)
        self._sync_monitor(now)
        self._engine_monitor.on_hellos(self.roster.ranks, now)
        return self._sync_roster(self.waves.recover(hellos), now)

    def introduced(self, hello: EngineHello, now: float) -> RankedCommands:
        """An engine has come after the recovery, or is new."""
        self.advance_epoch(hello.roster_epoch, now)
        rank, sends = hello.member.rank, []
        self._engine_monitor.on_hellos([rank], now)
        if rank in self._introducing and self.member(rank, hello.member.incarnation) is not None:
            self._update_member(rank, now, store=hello.member.store)
            sends = self.waves.change(self._with({rank} - self.detached))
        return self._sync_roster([*sends, *self.waves.introduced(rank, hello.epoch)], now)

    def advance_epoch(self, epoch: int, now: float) -> None:
        """An ingress has seen this epoch of a predecessor: ours comes after it."""
        if epoch > self.roster.epoch:
            self.cluster_state.change(
                lambda roster: msgspec.structs.replace(roster, epoch=epoch + 1), now
            )

    # ---------------------------------------------------------------- inside

    def _sync_roster(self, sends: RankedCommands, now: float) -> RankedCommands:
        """Let the roster follow the group, and complete the commands."""
        waves = self.waves
        if waves.group_state is GroupState.FORMING and self._stopped_at is None:
            self._stopped_at = now
        if waves.group_state is GroupState.SERVING and self._stopped_at is not None:
            self.commit_s, self._stopped_at = now - self._stopped_at, None
            self._broken_reason = ""
        if not self.is_stable:
            self._committed = None
        elif self._joining or not self._is_committed():
            self._commit_group(now)
            self._committed = waves.ranks, self.roster
        return [(rank, self._with_store(command)) for rank, command in sends]

    def _is_committed(self) -> bool:
        """Neither the group nor the roster has changed since the roster followed the group: so it
        is with each of the many load reports."""
        return (
            self._committed is not None
            and self._committed[0] is self.waves.ranks
            and self._committed[1] is self.roster
        )

    def _commit_group(self, now: float) -> None:
        """The group has formed: newcomers join, the detached leave, the repaired are active."""
        group = set(self.waves.ranks)
        arrived = [self._joining.pop(rank) for rank in list(self._joining) if rank in group]
        stays = group | set(self.roster.repairing) - self.detached

        def step(roster: Roster) -> Roster:
            roster = rosters.join(roster, arrived) if arrived else roster
            gone = set(roster.ranks) - stays
            roster = rosters.remove(rosters.detach(roster, gone & self.detached), gone)
            return rosters.end_repair(roster, group)

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

    def _sync_monitor(self, now: float) -> None:
        self.detached &= set(self.roster.ranks)
        self._repairs = {r: count for r, count in self._repairs.items() if self.roster.find(r)}
        self._engine_monitor.set_ranks({*self.roster.ranks, *self._joining}, now)
