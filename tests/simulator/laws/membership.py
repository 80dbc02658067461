"""Laws about the members of the cluster: who stays, who leaves in time, and who knows it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, starmap
from typing import TYPE_CHECKING

from swell.cluster.control.plan.fleet_view import Intent
from swell.cluster.control.plan.versions import UpgradeStage
from swell.coordinator.roster import Member, MemberState
from swell.coordinator.wave_protocol.wave_interface import Phase
from swell.coordinator.wire import ClusterView
from tests.simulator.actors import SimCoordinator, SimEngine
from tests.simulator.control_plane import HEARTBEAT_S, STALL_TIMEOUT_S, ControlPlane, SimIngress
from tests.simulator.kernel.process import Process
from tests.simulator.laws.calm import Calm, Durations

if TYPE_CHECKING:
    from tests.simulator.laws.observations.watch import Watch

_SILENT_S = STALL_TIMEOUT_S + 2 * HEARTBEAT_S
_UNHEARD_S = 3 * STALL_TIMEOUT_S + 2 * HEARTBEAT_S
"""The bound for an engine that has not sent anything to this coordinator."""
_HEARD_S = 2 * HEARTBEAT_S
_UNKNOWN_S = 1.5 * STALL_TIMEOUT_S
_FOLLOW_S = 3.5 * HEARTBEAT_S
"""The time within which peers of the coordinator must know what it knows: they poll every heartbeat
or two."""
_FORMED_S = 6.0
"""The time within which a group must form: each lost message is noticed a heartbeat later."""
_DEAD_S = 1.0
"""The time within which an engine that a manager has ended must leave the roster. It is shorter
than the period of the manager's roster check: no ingress may send requests to that engine."""
_AGAIN_S = 3.0
"""The time within which a call that has failed is repeated."""
_WANTED_S = 3.0
"""Engines that were wanted up to this long ago may still join."""


class MembershipWatch:
    """Checks these laws. `look` must be called several times per virtual second."""

    def __init__(
        self, plane: ControlPlane, watch: Watch, calm: Calm, broken: Callable[[str], None]
    ) -> None:
        self._plane, self._watch, self._calm, self._break = plane, watch, calm, broken
        self._kernel, self._durations = plane.kernel, Durations(plane)
        self._last: tuple[SimCoordinator, dict[int, Member]] | None = None
        """The coordinator at the last look, and its members by incarnation."""
        self._heard: set[tuple[SimCoordinator, int]] = set()
        """Incarnations that have reported to a coordinator."""
        self._wanted: list[tuple[float, int]] = []
        """How many engines the manager wanted in the last `_WANTED_S`, with the times: its target,
        and those that serve until their replacements do."""
        self._asked: dict[int, tuple[SimCoordinator, SimEngine | None]] = {}
        """Incarnations that were asked to leave, with the coordinator that removed them, and the
        engine if it was healthy until it was out of the roster."""
        self._asked_by: dict[int, set[SimCoordinator]] = {}
        """The coordinators that were asked to let each engine leave, and have not kept it; by
        incarnation."""
        self._kept_after: dict[int, int] = {}
        """The roster epoch at which each engine was kept that had been asked to leave, by
        incarnation. A late view of an earlier epoch may say that it has left."""
        self._ended: set[Process] = set()
        """Processes that a manager has asked to terminate."""
        self._viewed: dict[SimIngress, tuple[SimCoordinator | None, dict[int, Member]]] = {}
        """The members in the newest view of each ingress, and the coordinator at that time."""
        self._viewed_at: dict[SimIngress, float] = {}
        """When that view came. What has happened since may be forgotten in much later ones."""
        self._alone: set[SimEngine] = set()
        """Engines that served without a group at the last look."""
        plane.on_detach.append(self._on_detach)
        plane.on_keep.append(self._on_keep)
        plane.on_view.append(self._on_view)
        plane.ray.on_end.append(self._ended.add)

    def look(self) -> None:
        plane, calm = self._plane, self._calm
        self._record_target()
        coordinator = plane.coordinator
        if coordinator is not None and calm.coordinator_acts:
            members = _by_incarnation(coordinator.members)
            engines = {e.server.incarnation: e for e in plane.engines if e.server is not None}
            self._look_at_lost(coordinator, members, engines)
            self._look_at_asked(members)
            self._look_at_silent(coordinator, members, engines)
            self._look_at_repaired(members, engines)
            self._look_at_group(coordinator, engines)
            self._check_standalone(coordinator)
            self._look_at_ingresses(coordinator)
            self._look_at_requests(coordinator, members)
            if calm.manager_acts:
                self._look_at_unknown(members)
                self._look_at_ending(members)
                self._look_at_dead(members, engines)
                self._look_at_intents(members)
                self._look_at_troubles(members)
                self._look_at_joined(coordinator, members)
            self._last = coordinator, members
        self._durations.end_look()

    def _is_over(self, key: object, bound_s: float, *, holds: bool) -> bool:
        slowest = self._watch.slowest_clock
        return self._durations.held_s(key, holds=holds) > bound_s / slowest

    # ---------------------------------------------------------------- who stays, and who leaves

    def _look_at_lost(
        self, coordinator: SimCoordinator, members: dict[int, Member], engines: dict[int, SimEngine]
    ) -> None:
        """Checks that an engine that serves, reaches the coordinator and was not asked to leave or
        to stop stays in the roster. A new coordinator must keep it, too, because it waits for the
        engines' messages."""
        if self._last is None:
            return
        for incarnation in self._last[1].keys() - members.keys():
            engine = engines.get(incarnation)
            if engine is None or not engine.process.alive or incarnation in self._asked:
                continue
            self._check_lost(engine)

    def _check_lost(self, engine: SimEngine) -> None:
        if engine.stopped_at is None and not self._watch.may_lose(engine):
            self._break(f"{engine.process.name} was taken out of the roster, and was healthy")

    def _look_at_silent(
        self, coordinator: SimCoordinator, members: dict[int, Member], engines: dict[int, SimEngine]
    ) -> None:
        """Checks that an engine from which the coordinator hears nothing is removed in time.
        Reports that its connection holds back are heard when it delivers them."""
        net, process = self._plane.net, self._plane.coordinators[-1][0]
        for incarnation in members:
            engine = engines.get(incarnation)
            if engine is None:
                continue
            own = engine.process
            key = coordinator, incarnation
            reaches = self._calm.reach(own, process)
            if self._durations.held_s(("heard", *key), holds=reaches) > _HEARD_S:
                self._heard.add(key)
            bound_s = _SILENT_S if key in self._heard else _UNHEARD_S
            is_silent = not own.alive or own.stopped or net.is_cut(own.host, process.host)
            is_silent = is_silent and not self._calm.are_severed(own, process)
            # An engine that runs for a moment between two looks is heard.
            if self._is_over(("silent", *key, own.stops), bound_s, holds=is_silent):
                self._break(f"{own.name} is silent, and is in the roster")

    def _look_at_repaired(self, members: dict[int, Member], engines: dict[int, SimEngine]) -> None:
        """Checks that an engine that has all its workers again becomes active in time."""
        process = self._plane.coordinators[-1][0]
        for incarnation, member in members.items():
            engine = engines.get(incarnation)
            if engine is None or engine.server is None or self._plane.scenario.expert:
                continue
            executor, phase = engine.executor, engine.server.core.wave_member.phase
            is_whole = not (executor.worker_lost or executor.sleep_level)
            is_whole = is_whole and phase not in (Phase.OUT, Phase.FORMING)
            waits = is_whole and member.state is MemberState.REPAIRING
            waits = waits and self._calm.reach(engine.process, process)
            if self._is_over(("repaired", incarnation), _FOLLOW_S, holds=waits):
                self._break(f"{engine.process.name} serves again, and nobody knows")

    def _look_at_unknown(self, members: dict[int, Member]) -> None:
        """Checks that a member that the manager does not have is removed in time. The manager does
        not know the incarnation of an engine whose start it has cancelled: `_look_at_ending` judges
        the rank."""
        fleet = self._plane.manager.manager._fleet
        ours = {handle.ready.incarnation for handle in fleet.handles if handle.ready is not None}
        starting = (handle for handle in fleet.starting.values() if handle.ready is None)
        cancelled = {handle.rank for handle in starting if handle.leaving}
        for incarnation, member in members.items():
            holds = incarnation not in ours and member.rank not in cancelled
            if self._is_over(("unknown", incarnation), _UNKNOWN_S, holds=holds):
                self._break(f"the manager does not have the engine {member.rank} of the roster")

    def _look_at_ending(self, members: dict[int, Member]) -> None:
        """Checks that an engine that the manager ends, or whose start it has cancelled, is out of
        the roster in time, also if another coordinator lists it again."""
        fleet = self._plane.manager.manager._fleet
        cancelled = (handle for handle in fleet.starting.values() if handle.leaving)
        ranks = {handle.rank for handle in (*fleet.ending.values(), *cancelled)}
        for incarnation, member in members.items():
            is_listed = member.rank in ranks and not fleet.view().is_committing
            if self._is_over(("ending", incarnation), _FOLLOW_S, holds=is_listed):
                self._break(f"engine {member.rank} is in the roster, and the manager ends it")

    def _look_at_dead(self, members: dict[int, Member], engines: dict[int, SimEngine]) -> None:
        """Checks that an engine that a manager has ended leaves the roster as soon as it is dead. A
        manager that has just taken over, or was stopped while the coordinator restarted, compares
        the roster first."""
        has_failed = self._kernel.now - self._watch.faults_begun_at < _AGAIN_S
        manager, coordinator = self._plane.manager, self._plane.coordinators[-1][0]
        has_failed |= self._calm.were_reset(manager.process, coordinator)
        for incarnation in members:
            process = engines[incarnation].process if incarnation in engines else None
            is_dead = process is not None and not process.alive and process in self._ended
            is_dead = is_dead and not has_failed
            key = "dead", manager, incarnation
            if self._is_over(key, _DEAD_S, holds=is_dead):
                self._break(f"engine {members[incarnation].rank} was ended, and is in the roster")

    def _look_at_group(self, coordinator: SimCoordinator, engines: dict[int, SimEngine]) -> None:
        """Checks that engines that share experts form their group in time. All engines of the old
        and the new group must run, and reach each other and the coordinator."""
        machine = coordinator._state_machine
        if machine.is_stable or not machine.waves.lockstep:
            return
        ranks = sorted({*machine.waves.ranks, *machine.waves.target_ranks})
        members = [machine.current_member(rank) for rank in ranks]
        found = [engines.get(member.incarnation) if member else None for member in members]
        group = [engine for engine in found if engine is not None]
        processes = [self._plane.coordinators[-1][0], *(engine.process for engine in group)]
        is_able = len(group) == len(ranks) > 0 and all(
            engine.server is not None
            and engine.stopped_at is None
            and engine.server._coordinator_client._address == coordinator.address
            and not (engine.executor.hangs or engine.executor.worker_lost)
            for engine in group
        )
        is_able = is_able and all(starmap(self._calm.reach, combinations(processes, 2)))
        if self._is_over(("group", coordinator, *ranks), _FORMED_S, holds=is_able):
            self._break(f"engines {ranks} do not form a group")

    def _check_standalone(self, coordinator: SimCoordinator) -> None:
        """Checks that an engine leaves its group to serve standalone only if it does not hear a
        coordinator."""
        process, alone = self._plane.coordinators[-1][0], set()
        for engine in self._plane.living_engines if self._plane.scenario.expert else ():
            if (server := engine.server) is None:
                continue
            hears = server._coordinator_client._address == coordinator.address
            hears = hears and self._calm.reach(engine.process, process)
            heard_s = self._durations.held_s(("hears", engine), holds=hears)
            if server.core.wave_member.phase is Phase.STANDALONE:
                alone.add(engine)
                if engine not in self._alone and heard_s > _SILENT_S / self._watch.slowest_clock:
                    self._break(f"{engine.process.name} serves standalone, and a coordinator leads")
        self._alone = alone

    def _look_at_requests(self, coordinator: SimCoordinator, members: dict[int, Member]) -> None:
        """Checks that no request stays at a removed engine, whether its host was taken away or it
        lives on, if the ingress of the request can know the removal."""
        process = self._plane.coordinators[-1][0]
        for ingress in self._plane.ingresses:
            llm = ingress.llm
            if llm is None or ingress.coordinator_address != coordinator.address:
                continue
            reaches = self._calm.reach(ingress.process, process)
            for state in llm._processor.request_states.values() if reaches else ():
                is_gone = state.engine is not None and state.engine.incarnation not in members
                key = "gone", ingress, state.request_id, state.engine
                if self._is_over(key, _FOLLOW_S, holds=is_gone):
                    self._break(f"{state.request_id} stays at an engine that was taken out")

    # ---------------------------------------------------------------- who knows it

    def _look_at_intents(self, members: dict[int, Member]) -> None:
        """Checks that the roster and the manager agree on which engines leave."""
        for handle in self._plane.manager.manager._fleet.engines.values():
            assert handle.ready is not None
            member = members.get(handle.ready.incarnation)
            is_leaving = member is not None and member.state is MemberState.LEAVING
            differs = member is not None and handle.leaving != is_leaving
            differs = differs and not handle.in_transition and not (member and member.leaves)
            if self._is_over(("intent", handle, is_leaving), _FOLLOW_S, holds=differs):
                what = "leaves" if is_leaving else "stays"
                self._break(f"{handle.name} {what} in the roster, and not for the manager")

    def _look_at_troubles(self, members: dict[int, Member]) -> None:
        """Checks that failed starts are forgotten after one has succeeded."""
        manager = self._plane.manager.manager
        for rank, handle in manager._fleet.engines.items():
            assert handle.ready is not None
            serves = handle.ready.incarnation in members and not handle.in_transition
            counted = serves and manager._state.backoff.failures(rank) > 0
            if self._is_over(("trouble", handle), _FOLLOW_S, holds=counted):
                self._break(f"{handle.name} serves, and a start of its rank counts as failed")

    def _look_at_ingresses(self, coordinator: SimCoordinator) -> None:
        """Checks that each ingress has the newest roster in time."""
        process, epoch = self._plane.coordinators[-1][0], coordinator.epoch
        for ingress in self._plane.ingresses:
            if ingress.llm is None or ingress.coordinator_address != coordinator.address:
                continue
            reaches = self._calm.reach(ingress.process, process)
            key = "view", ingress, coordinator, epoch
            is_behind = reaches and ingress.llm.view.roster.epoch != epoch
            if self._is_over(key, _FOLLOW_S, holds=is_behind):
                self._break(f"{ingress.process.name} does not have the roster of epoch {epoch}")

    # ---------------------------------------------------------------- not too many engines

    def _record_target(self) -> None:
        now, manager = self._kernel.now, self._plane.manager
        if manager.has_started:
            fleet = manager.manager._fleet
            moving = sum(handle.intent is Intent.MOVE for handle in fleet.engines.values())
            self._wanted.append((now, manager.manager.target + moving))
            if any(handle.in_transition for handle in fleet.starting.values()):
                return
        self._wanted = [each for each in self._wanted if now - each[0] < _WANTED_S]

    def _look_at_joined(self, coordinator: SimCoordinator, members: dict[int, Member]) -> None:
        """Checks that no engine joins above the target number. One more may join while versions
        change, and any number while engines on draining hosts are replaced. Engines that are
        joining when the target falls still join: the next change follows."""
        if self._last is None or self._last[0] is not coordinator or self._plane.ray.draining:
            return
        upgrader = self._plane.manager.manager.upgrader
        may_be_extra = upgrader.record.stage is not UpgradeStage.SETTLED or len(upgrader._needed)
        active = [m for m in members.values() if m.state is MemberState.ACTIVE]
        newcomers = members.keys() - self._last[1].keys()
        wanted = max((target for _, target in self._wanted), default=len(active))
        if newcomers and len(active) > wanted + bool(may_be_extra):
            self._break(f"{len(active)} engines serve, and {wanted} are wanted")

    # ---------------------------------------------------------------- who left, and who was lost

    def _on_detach(self, ranks: list[int]) -> None:
        coordinator = self._plane.coordinator
        if coordinator is None:
            return
        engines = {e.server.incarnation: e for e in self._plane.engines if e.server is not None}
        for member in coordinator.members:
            if member.rank in ranks:
                engine = engines.get(member.incarnation)
                if engine is not None and self._watch.may_lose(engine):
                    engine = None
                self._asked[member.incarnation] = coordinator, engine
                self._asked_by.setdefault(member.incarnation, set()).add(coordinator)

    def _look_at_asked(self, members: dict[int, Member]) -> None:
        """Excuses an engine that was silent for long after it was asked to leave, and before the
        group without it had formed: the coordinator removes it at once, as lost."""
        for incarnation, (coordinator, engine) in self._asked.items():
            if engine is not None and incarnation in members and self._watch.is_excused(engine):
                self._asked[incarnation] = coordinator, None

    def _on_keep(self, ranks: list[int]) -> None:
        """Forgets earlier requests to leave: an engine that is kept leaves only after another one.
        A coordinator that Ray has given up does not know that its successor keeps it."""
        coordinator = self._plane.coordinator
        for member in () if coordinator is None else coordinator.members:
            if member.rank in ranks:
                self._asked.pop(member.incarnation, None)
                if coordinator in (by := self._asked_by.get(member.incarnation, set())):
                    self._kept_after[member.incarnation] = coordinator.epoch
                    by.discard(coordinator)

    def _on_view(self, ingress: SimIngress, view: ClusterView) -> None:
        """Checks that `left` in a view contains the engines that were asked to leave, and no
        others. A coordinator that Ray has given up loses all engines that it does not reach, and
        an ingress may follow it as long as it hears it."""
        members = _by_incarnation(view.roster.members)
        for incarnation in view.roster.left:
            is_late = view.roster.epoch <= self._kept_after.get(incarnation, 0)
            if not self._asked_by.get(incarnation) and not is_late:
                self._break(f"an engine has left by epoch {view.roster.epoch}, and was not asked")
            if incarnation in members:
                self._break(f"an engine has left by epoch {view.roster.epoch}, and is there")
        earlier, known = self._viewed.get(ingress, (None, members))
        newest = self._plane.coordinator
        if newest is not None and ingress.coordinator_address != newest.address:
            newest = None
        gone = known.keys() - members.keys() - {*view.roster.left}
        is_late = self._kernel.now - self._viewed_at.get(ingress, 0.0) > STALL_TIMEOUT_S
        for incarnation in () if newest is None or is_late else gone:
            coordinator, engine = self._asked.get(incarnation, (newest, None))
            if incarnation not in self._asked:
                self._look_at_vanished(incarnation)
            elif newest is not earlier:
                continue
            elif engine is not None and coordinator is newest and self._has_left(engine):
                self._break(f"{engine.process.name} was asked to leave, and counts as lost")
        self._viewed[ingress] = newest, members
        self._viewed_at[ingress] = self._kernel.now

    def _has_left(self, engine: SimEngine) -> bool:
        """Returns whether the engine did not die or fall silent before it left: a process that has
        terminated was ended by a manager."""
        if engine.process.alive:
            return not self._watch.may_lose(engine)
        return engine.process in self._ended

    def _look_at_vanished(self, incarnation: int) -> None:
        for engine in self._plane.living_engines:
            if engine.server is not None and engine.server.incarnation == incarnation:
                self._check_lost(engine)


def _by_incarnation(members: tuple[Member, ...]) -> dict[int, Member]:
    return {member.incarnation: member for member in members}
