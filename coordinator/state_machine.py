"""The coordinator's decisions: members, the group that steps together, stalled engines, and when a
restarted coordinator begins to decide. Pure.

    messages of engines  --> waves (which engines step)    --\\
    calls of the manager --> roster (the members)          ---> commands to engines,
    time                 --> engine monitor (stalls)       --/   views to ingresses

An engine that shares experts is in the roster from the moment its group has formed until a group
without it has formed, so ingresses never send requests to an engine that cannot serve. A group does
not wait for a newcomer that has not introduced itself: it may follow an earlier coordinator. An
engine that died or stalled is removed at once. One that replaces a worker stays in the roster and
is marked.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import msgspec

from swell.configs.schema import ClusterConfig
from swell.coordinator import roster as rosters
from swell.coordinator.manager_state import ManagerState
from swell.coordinator.monitors.engine_monitor import STUCK_FACTOR, EngineMonitor
from swell.coordinator.monitors.forming_monitor import (
    FormingFailure,
    FormingMonitor,
    Remedy,
    named,
    not_followed,
    not_formed,
    not_joined,
)
from swell.coordinator.publisher import ViewPublisher
from swell.coordinator.roster import Member, MemberState, Roster
from swell.coordinator.wave_protocol.wave_interface import (
    CoordinatorWaves,
    GroupState,
    Phase,
    RankedCommands,
)
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

MAX_STALLED = 256
"""Maximum number of stalled engines that are known: more than stall while no manager runs."""


class StalledEngine(msgspec.Struct, frozen=True):
    """An engine that was removed because it had stopped."""

    rank: int
    incarnation: int
    reason: str


class JoinResult(msgspec.Struct, frozen=True):
    """The result of a join."""

    roster: Roster
    refused: dict[int, str] = {}
    """Rank -> why the engine did not join; the other engines are in the roster."""


EngineEvent = EngineReport | StartWave | WaveComplete | Paused | Joined | Broken | Repaired


class CoordinatorStateMachine:
    """The state of a cluster. Methods that handle an event return the resulting commands."""

    def __init__(self, config: ClusterConfig, waves: CoordinatorWaves, now: float) -> None:
        self.publisher = ViewPublisher(config, now)
        self.waves = waves
        self.stalled_engines: list[StalledEngine] = []
        """Engines that were found stalled, the newest `MAX_STALLED`; the manager kills their
        processes."""
        self._num_stalled = 0
        """The number of all engines that were found stalled."""
        self.commit_s = 0.0
        """For how long the last change kept the group from stepping, in seconds."""
        self.manager_state = ManagerState()
        self._engine_monitor = EngineMonitor(config.stall_timeout_s, now)
        self._forming_monitor = FormingMonitor(STUCK_FACTOR * config.stall_timeout_s, now)
        self._joining: dict[int, Member] = {}
        """Engines that join as soon as their group has formed."""
        self._unheard: set[int] = set()
        """Joining engines that have not introduced themselves: no group waits for them yet."""
        self._repairs: dict[int, int] = {}
        """Rank -> how often its engine had replaced workers when it was last active."""
        self._introducing: set[int] = set()
        """Engines that must introduce themselves with their new workers, because `Repaired` was
        lost."""
        self.detached: set[int] = set()
        """Engines of the roster that will be removed once their group has formed without them."""
        self.called_off: dict[int, str] = {}
        """Rank -> reason, for newcomers that stalled or whose join was cancelled; kept until they
        join again."""
        self._broken_reason = ""
        """Reason why the group last failed to form."""
        self._stopped_at: float | None = None
        self._committed: tuple[tuple[int, ...], Roster] | None = None
        """The group that the roster follows, and that roster; None while one of them changes."""
        self._published: tuple[object, ...] = ()
        """Fields of the last published view that do not concern one engine."""

    @property
    def roster(self) -> Roster:
        return self.publisher.roster

    @property
    def is_stable(self) -> bool:
        """Whether no change of the group is in progress."""
        waves = self.waves
        return waves.group_state in (GroupState.SERVING, GroupState.PAUSED) and (
            waves.ranks is waves.target_ranks or waves.ranks == waves.target_ranks
        )

    @property
    def joining(self) -> set[int]:
        """Ranks that wait for their group."""
        return set(self._joining)

    @property
    def incarnations(self) -> set[int]:
        """Incarnations of engines that are in the roster or join."""
        return {member.incarnation for member in (*self.roster.members, *self._joining.values())}

    def current_member(self, rank: int) -> Member | None:
        """Returns the engine of this rank that receives commands, or None."""
        return self._joining.get(rank) or self.roster.find(rank)

    def member(self, rank: int, incarnation: int) -> Member | None:
        """Returns the engine of this incarnation if it is in the roster or joins, or None."""
        joining = self._joining.get(rank)
        if joining is not None and joining.incarnation == incarnation:
            return joining
        return self.roster.find(rank, incarnation)

    def keep_manager_state(self, state: ManagerState) -> None:
        """Keeps what the manager would need after a restart."""
        self.manager_state = state

    def view(self) -> ClusterView:
        return ClusterView(self.roster, self._reports())

    def _reports(self) -> ClusterReports:
        manager = self.manager_state
        return msgspec.structs.replace(
            self.publisher.reports(),
            wave=self.waves.wave,
            state=self.waves.group_state.value,
            stalls=self._num_stalled,
            commit_s=self.commit_s,
            phase=manager.phase,
            scaling=manager.scaling,
            adapters=manager.desired.adapters,
            sleep=manager.desired.sleep,
            cache_generation=manager.desired.cache_generation,
        )

    def publication(self, now: float) -> Publication | None:
        """Returns what must be published now. Changes that do not concern one engine are published
        together with all reports."""
        stalls = self._num_stalled
        status = self.waves.group_state, stalls, self.commit_s, self.manager_state
        due = self.publisher.due(now, has_news=status != self._published)
        if due is None or isinstance(due, EngineLoads):
            return due
        self._published = status
        return self.view() if isinstance(due, ClusterView) else self._reports()

    # ---------------------------------------------------------------- messages of engines

    def on_message(self, message: EngineEvent, now: float) -> RankedCommands:
        """Handles a message of an engine. Messages of unknown or removed engines are dropped."""
        member = self.member(message.rank, message.incarnation)
        if member is None:
            return []
        match message:
            case EngineReport():
                self.publisher.report(message, now)
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
                sends += self._check_repairs(member, message, now)
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
        return self._begin_repair(member, now)

    def _begin_repair(self, member: Member, now: float) -> RankedCommands:
        if member.state is not (state := MemberState.REPAIRING):
            leaves = member.state is MemberState.LEAVING
            self._update_member(member.rank, now, state=state, leaves=leaves)
        return self.waves.change(self._without({member.rank}), lost=True)

    def _repaired(self, member: Member, message: Repaired, now: float) -> RankedCommands:
        self._update_member(member.rank, now, store=message.store)
        return self.waves.change(self._with({member.rank} - self.detached))

    def _check_repairs(self, member: Member, report: EngineReport, now: float) -> RankedCommands:
        """Detects from a report that `Broken` or `Repaired` was lost: that an engine replaces a
        worker, or has replaced it."""
        rank = member.rank
        if member.state is not MemberState.REPAIRING:
            self._repairs[rank] = report.repairs
            self._introducing.discard(rank)
            return self._begin_repair(member, now) if report.is_repairing else []
        if report.repairs > self._repairs.get(rank, 0) and rank not in self.waves.target_ranks:
            self._introducing.add(rank)
            return [(rank, Introduce())]
        return []

    # ---------------------------------------------------------------- calls of the manager

    def join(
        self,
        members: Iterable[Member],
        now: float,
        unheard: Container[int] = (),
        earlier: Container[int] = (),
    ) -> RankedCommands:
        """Adds engines that are ready; one that is already a member stays. `earlier`: incarnations
        of engines that had these ranks, which are removed. Raises ValueError if another engine has
        one of the ranks. `unheard`: incarnations that have not introduced themselves to this
        coordinator. Engines that share experts do so before their group changes."""
        newcomers = [m for m in members if self.member(m.rank, m.incarnation) is None]
        staying = [m for m in self.roster.members if m.incarnation not in earlier]
        rosters.join(rosters.of(self.roster.epoch, staying), newcomers)  # raises
        sends = self.remove_failed([m.rank for m in newcomers], now, earlier)
        self._joining.update({member.rank: member for member in newcomers})
        for member in newcomers:
            self.called_off.pop(member.rank, None)
        self._sync_monitor(now)
        heard = {m.rank for m in newcomers if m.incarnation not in unheard}
        self._engine_monitor.on_hellos(heard, now)
        self._unheard -= heard
        if self.waves.lockstep:
            self._unheard |= {m.rank for m in newcomers} - heard
        able = self._joining.keys() - self._unheard
        return [*sends, *self._sync_roster(self.waves.change(self._with(able)), now)]

    def finish_join(self, ranks: set[int], timeout_s: float) -> JoinResult:
        """Returns the current result for these engines; those that are not in the roster must be
        removed. `timeout_s`: the time that they had."""
        refused = {
            rank: self.called_off.get(rank) or not_joined(rank, timeout_s, rank in self._joining)
            for rank in sorted(ranks.difference(self.roster.ranks))
        }
        return JoinResult(self.roster, refused)

    def leave(self, ranks: Iterable[int], now: float) -> RankedCommands:
        """Stops new requests to these engines."""
        self.publisher.change(lambda roster: rosters.leave(roster, ranks), now)
        return []

    def cancel_leave(self, ranks: Iterable[int], now: float) -> RankedCommands:
        """Makes engines that were leaving active again."""
        self.publisher.change(lambda roster: rosters.cancel_leave(roster, ranks), now)
        back = self.detached & set(ranks)
        self.detached -= back
        return self._sync_roster(self.waves.change(self._with(back)), now)

    def detach(self, ranks: Iterable[int], now: float) -> RankedCommands:
        """Removes running engines: first their group continues without them, then the roster."""
        self.detached |= set(ranks).intersection(self.roster.ranks)
        self._committed = None  # perhaps they are in no group
        return self._sync_roster(self.waves.change(self._without(set(ranks))), now)

    def remove_failed(
        self, ranks: Iterable[int], now: float, incarnations: Container[int] | None = None
    ) -> RankedCommands:
        """Removes dead engines from the roster at once. With `incarnations` it removes only these:
        the rank may have another engine by now."""
        gone = {
            rank
            for rank in ranks
            if incarnations is None
            or ((found := self.current_member(rank)) and found.incarnation in incarnations)
        }
        if incarnations is not None and not gone:
            return []
        for rank in gone:
            self._joining.pop(rank, None)
        self.publisher.change(lambda roster: rosters.remove(roster, gone), now)
        self._sync_monitor(now)
        return self._sync_roster(self.waves.change(self._without(gone), lost=True), now)

    def pause(self, now: float) -> RankedCommands:
        return self._sync_roster(self.waves.pause(), now)

    def resume(self, now: float) -> RankedCommands:
        return self._sync_roster(self.waves.resume(), now)

    # ---------------------------------------------------------------- time passes

    def tick(self, now: float) -> RankedCommands:
        """Removes stalled engines, and resolves groups that do not form in time."""
        sends: RankedCommands = []
        may_rest = frozenset({*self.roster.ranks, *self._joining}) - self.waves.stepping
        for rank, reason in self._engine_monitor.check(now, may_rest).items():
            if self.current_member(rank) is not None:  # it was not removed with another one
                sends += self._remove_stalled(rank, reason, now)
        return [*sends, *self._check_forming(now)]

    def _remove_stalled(self, rank: int, reason: str, now: float) -> RankedCommands:
        if (member := self.current_member(rank)) is not None:
            stalled = StalledEngine(rank, member.incarnation, reason)
            self.stalled_engines = [*self.stalled_engines, stalled][-MAX_STALLED:]
            self._num_stalled += 1
        if rank in self._joining:
            self.called_off[rank] = reason
        return self.remove_failed([rank], now)

    def _check_forming(self, now: float) -> RankedCommands:
        """Handles what prevents a group from forming."""
        waves = self.waves
        failure = self._forming_monitor.check(waves, self._joining.keys(), now)
        sends: RankedCommands = []
        match failure.remedy:
            case Remedy.REMOVE:
                reasons = {rank: self._describe(failure, rank) for rank in sorted(failure.ranks)}
                for rank, reason in reasons.items():
                    sends += self._remove_stalled(rank, reason, now)
            case Remedy.CALL_OFF:
                for rank in sorted(failure.ranks):
                    self.called_off[rank] = self._describe(failure, rank)
                    del self._joining[rank]
                self._sync_monitor(now)
                remaining = self._without(set(failure.ranks))
                sends += self._sync_roster(waves.change(remaining, lost=True), now)
            case Remedy.FORM_AGAIN:
                sends += self._sync_roster(waves.broken(waves.epoch), now)
        return sends

    def _describe(self, failure: FormingFailure, rank: int) -> str:
        """Returns why the group is formed without this engine."""
        member, waited_s = self.current_member(rank), failure.waited_s
        found = map(self.current_member, failure.unreached_by.get(rank, ()))
        peers = [peer for peer in found if peer is not None]
        if member is None or (failure.remedy is Remedy.REMOVE and not peers):
            return not_followed(rank, member, self.waves.epoch, waited_s)
        return not_formed(member, waited_s, peers, self._broken_reason)

    def recover(self, epoch: int, hellos: Sequence[EngineHello], now: float) -> RankedCommands:
        """Takes over the engines of an earlier coordinator; `epoch` is the newest roster epoch that
        any ingress or engine has seen."""
        self.publisher.change(lambda _: rosters.of(epoch + 1, (h.member for h in hellos)), now)
        self._sync_monitor(now)
        self._engine_monitor.on_hellos(self.roster.ranks, now)
        return self._sync_roster(self.waves.recover(hellos), now)

    def introduced(self, hello: EngineHello, now: float) -> RankedCommands:
        """Handles the hello of an engine that is new or comes after the recovery."""
        self.advance_epoch(hello.roster_epoch, now)
        rank = hello.member.rank
        sends = self.waves.introduced(rank, hello.epoch)
        if (found := self.member(rank, hello.member.incarnation)) is not None:
            self._engine_monitor.on_hellos([rank], now)
            if rank in self._introducing:
                self._update_member(rank, now, store=hello.member.store)
            is_repairing = found.state is MemberState.REPAIRING
            if rank in self._introducing or (rank in self._unheard and not is_repairing):
                sends += self.waves.change(self._with({rank} - self.detached))
            self._unheard.discard(rank)
        return self._sync_roster(sends, now)

    def advance_epoch(self, epoch: int, now: float) -> None:
        """Moves the roster past an epoch of a predecessor that an ingress or engine has seen."""
        if epoch > self.roster.epoch:
            self.publisher.change(
                lambda roster: msgspec.structs.replace(roster, epoch=epoch + 1), now
            )

    # ---------------------------------------------------------------- inside

    def _sync_roster(self, sends: RankedCommands, now: float) -> RankedCommands:
        """Updates the roster after a change of the group, and completes the commands."""
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
        """Whether neither the group nor the roster has changed since the roster followed the group,
        as for most of the frequent load reports."""
        return (
            self._committed is not None
            and self._committed[0] is self.waves.ranks
            and self._committed[1] is self.roster
        )

    def _commit_group(self, now: float) -> None:
        """Applies a formed group to the roster: newcomers join, the detached leave, the repaired
        become active."""
        group = set(self.waves.ranks)
        arrived = [self._joining.pop(rank) for rank in list(self._joining) if rank in group]
        stays = group | set(self.roster.repairing) - self.detached

        def step(roster: Roster) -> Roster:
            roster = rosters.join(roster, arrived) if arrived else roster
            gone = set(roster.ranks) - stays
            roster = rosters.remove(rosters.detach(roster, gone & self.detached), gone)
            return rosters.end_repair(roster, group)

        self.publisher.change(step, now)
        self._sync_monitor(now)

    def _update_member(self, rank: int, now: float, **changes: object) -> None:
        if rank in self._joining:
            self._joining[rank] = msgspec.structs.replace(self._joining[rank], **changes)
        self.publisher.change(lambda roster: rosters.update_members(roster, [rank], **changes), now)

    def _with_store(self, command: EngineCommand) -> EngineCommand:
        """Adds the store of the first engine, at which the workers of several engines meet."""
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
        self._unheard &= self._joining.keys()
        self._repairs = {r: count for r, count in self._repairs.items() if self.roster.find(r)}
        self._engine_monitor.set_ranks({*self.roster.ranks, *self._joining}, now)


def recovery_s(config: ClusterConfig, first_heard_s: float | None, *, has_moved: bool) -> float:
    """Returns how long a restarted coordinator listens in total. `first_heard_s` is when the first
    engine introduced itself. At the predecessor's address, peers reconnect within a second and then
    send a message each heartbeat. At another address (`has_moved`, or the first engine is late),
    they must first notice that the predecessor is silent; all that reached it until its end notice
    it within a heartbeat of each other. After one that was cut off before, the others may come too
    late, and join again."""
    soon_s = 1.0 + config.heartbeat_s
    limit_s = soon_s + config.stall_timeout_s
    if first_heard_s is None:
        return limit_s
    if first_heard_s <= soon_s and not has_moved:
        return soon_s
    return min(limit_s, first_heard_s + soon_s + config.heartbeat_s)
