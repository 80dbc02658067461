"""Laws about engines that leave, are kept after all, or move, and about requests that wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from swell.cluster.client.engine_connection import EngineId
from swell.cluster.control.engines.engine_handle import EngineHandle
from swell.cluster.control.plan.fleet_view import Intent
from swell.cluster.control.plan.versions import UpgradeStage
from swell.coordinator.roster import Member, MemberState, Roster
from tests.simulator.actors import SimCoordinator, SimEngine, SimManager
from tests.simulator.control_plane import DRAIN_TIMEOUT_S, HEARTBEAT_S, ControlPlane
from tests.simulator.laws.calm import Calm, Durations
from tests.simulator.laws.observations.disturbances import LOOK_S

if TYPE_CHECKING:
    from tests.simulator.laws.observations.watch import Watch

_DETACHED_S = 3.0
"""The time within which an engine that has finished its requests, or whose drain time is over, is
out of the roster."""
_EXTENDED_S = 1.0
"""The time by which a new manager may extend a drain: until a coordinator that acts knows it again.
Time in which none acts does not count as drain time, because none can mark the engine."""
_MOVING_S = 4.7 * HEARTBEAT_S
"""The time within which a manager knows that a host stays: after two polls, each two heartbeats
after the previous one."""
_QUEUED_S = 2.0 * HEARTBEAT_S
"""The time by which a request may fail later than its limit: a late timer is extended once."""


def leaves(member: Member) -> bool:
    """Returns whether an engine leaves, or will leave once it has replaced its worker."""
    will_leave = member.state is MemberState.REPAIRING and member.leaves
    return will_leave or member.state is MemberState.LEAVING


def _incarnation(handle: EngineHandle) -> int:
    """Returns the incarnation of an engine. One that has loaded other weights has another one, and
    its name is the same."""
    assert handle.ready is not None
    return handle.ready.incarnation


class LeavingWatch:
    """Checks these laws. `look` must be called several times per virtual second."""

    def __init__(
        self, plane: ControlPlane, watch: Watch, calm: Calm, broken: Callable[[str], None]
    ) -> None:
        self._plane, self._watch, self._calm, self._break = plane, watch, calm, broken
        self._durations = Durations(plane)
        self._decided: dict[int, object] = {}
        """Incarnations of engines that a manager has decided to keep, with the request for which it
        did so last."""
        self._kept: dict[int, object] = {}
        """The incarnations that the coordinator has kept, with the same request."""
        self._manager: SimManager | None = None
        """The manager at the last look."""
        self._followed_at = 0.0
        """When it was first seen to lead."""
        self._continued: set[int] = set()
        """The incarnations whose drains it has begun, or could continue from a stored record."""
        self._is_stored: dict[int, bool] = {}
        """For each leaving engine, by incarnation: whether the record of its drain is stored."""
        self._deadlines: dict[int, tuple[SimManager, int, float]] = {}
        """When the drain time of each leaving engine ends, by incarnation, with the manager and the
        number of requests of operators at that time."""
        self._unmarkable: dict[SimManager, float] = {}
        """For how many seconds no coordinator has acted under the newest manager."""
        self._unmarked_s: dict[int, float] = {}
        """For how many seconds each leaving engine could not be marked, because no coordinator
        acted; by incarnation."""
        self._restarted: dict[int, float] = {}
        """When the drains of these engines started again, because no record was stored, or because
        they had left and joined again; by incarnation."""
        self._detached: set[int] = set()
        """The incarnations that were detached, until they join again."""
        plane.on_decided_keep.append(self._on_decided_keep)
        plane.on_keep.append(self._on_keep)
        self._named: set[str] = set()
        """The engines that an operator has taken out by their rank, by name."""
        plane.on_leave.append(self._on_leave)
        plane.on_detach.append(self._on_detach)
        plane.on_roster.append(self._on_roster)
        plane.on_answer.append(self._on_answer)

    def look(self) -> None:
        coordinator, manager = self._plane.coordinator, self._plane.manager
        waited_s = self._unmarkable.get(manager, 0.0)
        self._unmarkable = {manager: waited_s + (not self._calm.coordinator_acts) * LOOK_S}
        self._note_unmarked()
        if coordinator is not None and self._calm.coordinator_acts and self._calm.manager_acts:
            self._note_records()
            self._look_at_deadlines()
            self._look_at_drains(coordinator)
            self._look_at_named()
            self._look_at_moves()
        self._look_at_queues()
        self._durations.end_look()

    def _is_over(self, key: object, bound_s: float, *, holds: bool) -> bool:
        return self._durations.held_s(key, holds=holds) > bound_s / self._watch.slowest_clock

    # ---------------------------------------------------------------- an engine that is kept stays

    def _on_decided_keep(self, manager: SimManager, ranks: list[int]) -> None:
        """Notes the reason now: a coordinator that is stopped executes the command much later, and
        meanwhile an operator may request something else. The manager may repeat the command, so the
        coordinator may execute several for one reason."""
        for rank in ranks:
            ready = manager.manager._fleet.engines[rank].ready
            assert ready is not None
            self._decided[ready.incarnation] = self._reason_to_leave()

    def _on_keep(self, ranks: list[int]) -> None:
        """Checks that an engine that is kept neither leaves nor will leave."""
        coordinator = self._plane.coordinator
        for member in () if coordinator is None else coordinator.members:
            if member.rank in ranks:
                self._kept[member.incarnation] = self._decided.get(member.incarnation)
                if leaves(member):
                    self._break(f"engine {member.rank} is kept, and leaves")

    def _on_leave(self, ranks: list[int]) -> None:
        """Checks that an engine that was kept leaves only for another reason."""
        coordinator, plane = self._plane.coordinator, self._plane
        if coordinator is None or plane.scenario.autoscaled or plane.ray.draining:
            return
        for member in coordinator.members:
            reason = self._kept.get(member.incarnation)
            if member.rank in ranks and reason is not None and reason == self._reason_to_leave():
                self._break(f"engine {member.rank} was kept, and leaves without a request")

    def _on_detach(self, ranks: list[int]) -> None:
        """Forgets when the drain time of an engine ends that has left: it may join again."""
        coordinator = self._plane.coordinator
        for member in () if coordinator is None else coordinator.members:
            if member.rank in ranks:
                self._deadlines.pop(member.incarnation, None)
                self._detached.add(member.incarnation)

    def _on_roster(self, before: Roster, after: Roster, _kept: frozenset[int]) -> None:
        """Notes engines that join again after they have left, perhaps because their manager was
        lost before it could end them. If they have to leave, they have the whole drain time."""
        for member in after.members if self._detached else ():
            is_new = before.find(member.rank, member.incarnation) is None
            if is_new and member.incarnation in self._detached:
                self._detached.discard(member.incarnation)
                self._restarted[member.incarnation] = self._plane.kernel.now

    def _reason_to_leave(self) -> object:
        """Returns what may make engines leave; None: it may change without a request."""
        operator, manager = self._plane.operator, self._plane.manager.manager
        record = manager.upgrader.record
        if record.stage is not UpgradeStage.SETTLED or manager.upgrader._needed:
            return None
        if self._calm.calls_are_late:  # a request may come between a call and its execution
            return None
        return manager, operator.num_begun, manager.target, record.wanted

    # ---------------------------------------------------------------- a drained engine leaves

    def _on_answer(self, manager: SimManager, call: str, error: Exception | None) -> None:
        operation = next(iter(self._plane.operator.unanswered), None)
        if call != "drain" or error is not None or operation is None:
            return
        handle = manager.manager._fleet.engines.get(operation.argument)
        if operation.kind == call and handle is not None and handle.intent is Intent.DRAIN:
            self._named.add(handle.name)

    def _look_at_named(self) -> None:
        """Checks that an engine that an operator has taken out leaves, under each later manager,
        too."""
        for handle in self._plane.manager.manager._fleet.engines.values():
            if handle.name in self._named and handle.intent is not Intent.DRAIN:
                self._break(
                    f"{handle.name} was drained by its rank, and is to {handle.intent.value}"
                )

    # ---------------------------------------------------------------- a drain ends in time

    def _note_unmarked(self) -> None:
        """Adds the time without a coordinator that acts: the drain time of an engine begins when a
        coordinator marks it."""
        if self._calm.coordinator_acts:
            return
        for handle in self._plane.manager.manager._fleet.engines.values():
            if handle.leaving and not handle.is_marked:
                incarnation = _incarnation(handle)
                waited_s = self._unmarked_s.get(incarnation, 0.0)
                self._unmarked_s[incarnation] = waited_s + LOOK_S

    def _note_records(self) -> None:
        """Notes the drains that start again at a manager that has found no record of them: at
        once, or when their engine is a member again. So does a drain whose record was stored
        before the coordinator knew it: drain time begins when the coordinator knows it, and the
        manager may be lost before it stores the next record."""
        manager, now = self._plane.manager, self._plane.kernel.now
        fleet, stored = manager.manager._fleet, manager.manager._checkpoints._saved.drains
        leaving = [handle for handle in fleet.engines.values() if handle.leaving]
        if manager is not self._manager:
            self._manager, self._followed_at = manager, now
            self._continued = {each for each, is_stored in self._is_stored.items() if is_stored}
        processes = {e.server.incarnation: e.process for e in self._plane.engines if e.server}
        for incarnation in {*map(_incarnation, leaving)} - self._continued:
            self._continued.add(incarnation)
            process = processes.get(incarnation)
            begun_at = now if process is None else self._watch.leaving.get(process, now)
            if begun_at < self._followed_at:
                self._restarted[incarnation] = now
        known = {(each.name, each.next_version) for each in stored if not each.unmarked_s}
        self._is_stored = {
            _incarnation(handle): handle.drain is not None
            and (handle.drain.name, handle.drain.next_version) in known
            for handle in leaving
        }

    def _look_at_drains(self, coordinator: SimCoordinator) -> None:
        """Checks that a leaving engine is detached soon after its last request, and soon after its
        drain time, also if another manager has started the drain. Nobody knows that an engine is
        idle while it follows an earlier coordinator."""
        fleet = self._plane.manager.manager._fleet
        if fleet.view().is_committing or any(each.in_transition for each in fleet.handles):
            return
        engines = {e.server.incarnation: e for e in self._plane.engines if e.server is not None}
        process = self._plane.coordinators[-1][0]
        for handle in fleet.engines.values():
            assert handle.ready is not None
            member = handle.find_in(coordinator._state_machine.roster)
            engine = engines.get(handle.ready.incarnation)
            if member is None or engine is None or not (handle.leaving and leaves(member)):
                continue
            if handle.rank in fleet._drain._held or handle.intent is Intent.MOVE:
                continue
            is_late = self._plane.kernel.now > self._deadline(handle, engine)
            if self._is_over(("late", handle), _DETACHED_S, holds=is_late):
                self._break(f"{handle.name} leaves for longer than its drain time")
            is_idle = self._is_idle(engine, member) and self._calm.reach(engine.process, process)
            is_idle = is_idle and not self._calm.were_reset(engine.process, process)
            is_idle = is_idle and not self._watch.may_be_unheard(engine)
            key = "idle", handle, coordinator.epoch
            if self._is_over(key, _DETACHED_S, holds=is_idle):
                self._break(f"{handle.name} has no requests, and does not leave")

    def _look_at_deadlines(self) -> None:
        """Checks that a manager that continues a drain gives it no more time than it had left."""
        plane, operator = self._plane, self._plane.operator
        if self._watch.slowest_clock < 1.0 or self._watch.fastest_clock > 1.0:
            return
        loop, now = plane.manager.process.loop, plane.kernel.now
        before, self._deadlines = self._deadlines, {}
        for handle in plane.manager.manager._fleet.engines.values():
            if not handle.leaving:
                continue
            incarnation = _incarnation(handle)
            if not handle.is_marked:
                if incarnation in before:
                    self._deadlines[incarnation] = before[incarnation]
                continue
            ends_at = now + handle.leave_deadline_s - loop.time()
            manager, num_begun, earlier = before.get(incarnation, (plane.manager, 0, ends_at))
            is_continued = manager is not plane.manager and num_begun == operator.num_begun
            is_continued = is_continued and incarnation not in self._restarted
            more_s = ends_at - max(now, earlier)
            bound_s = _EXTENDED_S + self._unmarkable[plane.manager]
            if is_continued and more_s > bound_s and not plane.scenario.autoscaled:
                self._break(f"{handle.name} got {more_s:.1f} s more by a new manager")
            self._deadlines[incarnation] = plane.manager, operator.num_begun, ends_at

    def _deadline(self, handle: EngineHandle, engine: SimEngine) -> float:
        now = self._plane.kernel.now
        since = max(
            self._watch.leaving.get(engine.process, now),
            self._plane.operator.changed_at,
            self._restarted.get(_incarnation(handle), 0.0),
        )
        unmarked_s = self._unmarked_s.get(_incarnation(handle), 0.0)
        return since + unmarked_s + DRAIN_TIMEOUT_S / self._watch.slowest_clock

    def _is_idle(self, engine: SimEngine, member: Member) -> bool:
        if engine.server is None or engine.has_work or not engine.process.runs:
            return False
        if engine.server.core.scheduler.requests:  # a paused engine does not compute them
            return False
        id = EngineId.of(member)
        return member.state is MemberState.LEAVING and not any(
            id in ingress.llm.engines_in_use()
            for ingress in self._plane.ingresses
            if ingress.llm is not None and ingress.process.alive
        )

    def _look_at_moves(self) -> None:
        """Checks that an engine moves only while its host will be taken away."""
        for handle in self._plane.manager.manager._fleet.engines.values():
            assert handle.ready is not None
            is_moving = handle.intent is Intent.MOVE
            stays = is_moving and handle.ready.node not in self._plane.ray.draining
            if self._is_over(("moving", handle), _MOVING_S, holds=stays):
                self._break(f"{handle.name} moves, and its host stays")

    # ---------------------------------------------------------------- who waits, fails in time

    def _look_at_queues(self) -> None:
        """Checks that a request that no engine takes fails by its time limit."""
        for ingress in self._plane.ingresses:
            llm, process = ingress.llm, ingress.process
            if llm is None or not process.alive or not len(llm._placer._queue):
                continue
            limit_s = llm._config.serve.no_engine_timeout_s + _QUEUED_S
            for state in llm._processor.request_states.values():
                waits = state.is_queued and not state.ranks and process.runs
                if self._is_over(("queued", state), limit_s, holds=waits):
                    self._break(f"{state.request_id} waits for an engine for longer than its limit")
