"""Laws about single decisions, checked when they are made: changes of the roster, commands of
managers, the placement of a request, and starts of missing engines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from swell.cluster.client.engine_connection import EngineId
from swell.configs.runtime.log import StructuredLogger
from swell.coordinator.manager_state import ManagerId, ManagerState
from swell.coordinator.roster import Member, MemberState, Roster
from swell.engine.serving.server import EngineServer
from swell.engine.wire import EngineCoreRequest
from tests.simulator.actors import SimCoordinator, SimManager
from tests.simulator.control_plane import (
    HEARTBEAT_S,
    STALL_TIMEOUT_S,
    ControlPlane,
    SimIngress,
)
from tests.simulator.kernel.process import Process
from tests.simulator.laws.calm import Calm, Durations
from tests.simulator.laws.freed import connections_of
from tests.simulator.laws.leaving import leaves

if TYPE_CHECKING:
    from tests.simulator.laws.observations.watch import Watch

_DECIDED_S = 2.0 * HEARTBEAT_S
"""The time within which a manager starts, keeps, cancels or drains engines."""
_REPAIR_KNOWN_S = 1.5 * HEARTBEAT_S
"""The time within which the coordinator knows that an engine replaces a worker: the next heartbeat
says so if the first message was lost."""
_MAX_STARTS, _STARTS_S = 12, 20.0
"""More than as many engines of one rank as a manager starts within as many seconds."""
_DEFECTS = re.compile(
    r"\b(AssertionError|AttributeError|IndexError|KeyError|NameError|NotImplementedError|"
    r"RecursionError|StopIteration|TypeError|UnboundLocalError|ZeroDivisionError)\b"
)


class DecisionWatch:
    """Checks these laws. `look` must be called several times per virtual second."""

    def __init__(
        self, plane: ControlPlane, watch: Watch, calm: Calm, broken: Callable[[str], None]
    ) -> None:
        self._plane, self._watch, self._calm, self._break = plane, watch, calm, broken
        self._durations = Durations(plane)
        self._num_engines = 0
        """The number of engines that had been created at the last look."""
        self._created: dict[int, list[float]] = {}
        """Rank -> when its last `_MAX_STARTS` engines were created."""
        self._late: set[str] = set()
        """Names of engines that a manager was about to start when another one had taken over."""
        self._planner: dict[str, SimManager] = {}
        """Name of an engine -> the manager that started it."""
        self.orphans: set[Process] = set()
        """Engines of an earlier manager that Ray created after another one had taken over: the call
        was late."""
        plane.on_grow.append(self._on_grow)
        plane.on_roster.append(self._on_roster)
        plane.on_command.append(self._on_command)
        plane.on_kept.append(self._on_kept)
        plane.on_refused.append(self._on_refused)
        plane.on_send.append(self._on_send)
        plane.on_replace.append(self._on_replace)
        self._replaced: dict[EngineServer, dict[bytes, float]] = {}
        """Connections that their ingress has replaced, as each engine was told, and until when
        their late messages may arrive."""

    def look(self) -> None:
        self._look_at_starts()
        self._look_at_replaced()
        if self._calm.coordinator_acts:
            self._look_at_repairs()
            if self._calm.manager_acts:
                self._look_at_plans()
        self._durations.end_look()

    def _is_over(self, key: object, bound_s: float, *, holds: bool) -> bool:
        return self._durations.held_s(key, holds=holds) > bound_s / self._watch.slowest_clock

    # ---------------------------------------------------------------- the coordinator

    def _on_roster(self, before: Roster, after: Roster, kept: frozenset[int]) -> None:
        """Checks that a change of the roster has a greater epoch, and that an engine that leaves
        goes on leaving unless the manager keeps it (`kept`)."""
        if after.epoch <= before.epoch:
            self._break(f"another roster has the epoch {after.epoch}")
        for member in after.members:
            was = before.find(member.rank, member.incarnation)
            is_back = was is not None and leaves(was) and not leaves(member)
            if is_back and member.rank not in kept:
                self._break(f"engine {member.rank} leaves no longer, and nobody keeps it")

    def _on_command(self, by: ManagerId, state: ManagerState) -> None:
        """Checks that no manager changes a coordinator that knows a newer one."""
        if state.desired.owner not in ("", by.owner) and by.term < state.desired.term:
            self._break(f"a manager of term {by.term} acts, and {state.desired.term} leads")

    def _on_refused(self, newcomers: list[Member], reason: str) -> None:
        """Checks that no engine is to join while its rank is taken: the manager removes an earlier
        engine of the rank first."""
        self._break(f"engines {[each.rank for each in newcomers]} cannot join: {reason}")

    def _on_kept(
        self, coordinator: SimCoordinator, before: ManagerState, after: ManagerState
    ) -> None:
        if after.desired.age < before.desired.age:
            self._break("the coordinator goes back to an older state of the manager")

    def _look_at_repairs(self) -> None:
        """Checks that the coordinator knows in time that an engine replaces a worker."""
        coordinator = self._plane.coordinator
        assert coordinator is not None
        members = {member.incarnation: member for member in coordinator.members}
        process = self._plane.coordinators[-1][0]
        for engine in self._plane.living_engines:
            member = members.get(engine.server.incarnation) if engine.server else None
            waits = member is not None and member.state is not MemberState.REPAIRING
            waits = waits and engine.executor.is_repairing
            waits = waits and self._calm.reach(engine.process, process)
            if self._is_over(("repair", engine), _REPAIR_KNOWN_S, holds=waits):
                self._break(f"{engine.process.name} replaces a worker, and nobody knows")

    # ---------------------------------------------------------------- the manager

    def _look_at_plans(self) -> None:
        """Checks that a manager starts or keeps engines in time if some are missing, and cancels or
        drains some if there are too many."""
        manager = self._plane.manager.manager
        fleet, target = manager._fleet.view(), manager.target
        is_free = not fleet.is_committing and not any(e.in_transition for e in fleet.engines)
        now, backoff = self._plane.manager.process.loop.time(), manager._state.backoff
        waits = any(backoff.wait_s(rank, now) for rank in range(2 * target))
        missing = target - fleet.num_present
        is_late = missing > 0 and not waits and not fleet.is_reserved
        if self._is_over(("missing", manager, missing), _DECIDED_S, holds=is_late):
            self._break(f"{missing} engines are missing, and none is started")
        surplus = len(fleet.staying) + len(fleet.starting) - target
        is_late = surplus > 0 and is_free
        if self._is_over(("surplus", manager, surplus), _DECIDED_S, holds=is_late):
            self._break(f"{surplus} engines are too many, and none leaves")

    def _on_grow(self, manager: SimManager, names: list[str]) -> None:
        self._planner.update(dict.fromkeys(names, manager))
        newest = self._plane.manager
        is_replaced = newest is not manager and newest.has_started
        if is_replaced and self._plane.ray.is_reachable(manager.process.host):
            self._late.update(names)

    def _look_at_starts(self) -> None:
        """Checks that failed starts are repeated with a growing delay: the engines of one rank are
        not created in quick succession. A manager starts none after another one has taken over."""
        now, engines, newest = self._plane.kernel.now, self._plane.engines, self._plane.manager
        for engine in engines[self._num_engines :]:
            name, planned = engine.process.name, engine.process.name.rpartition(".")[0]
            if planned in self._late:
                self._break(f"{name} is started by a manager that was replaced")
            fleet = newest.manager._fleet
            known = {each.name for each in (*fleet.engines.values(), *fleet.starting.values())}
            is_late = newest.has_started and self._planner.get(planned) is not newest
            if is_late and planned not in known:
                self.orphans.add(engine.process)
            created = [*self._created.get(engine.rank, ()), now][-_MAX_STARTS:]
            self._created[engine.rank] = created
            if len(created) == _MAX_STARTS and now - created[0] < _STARTS_S:
                self._break(f"engine {engine.rank} starts again and again")
        self._num_engines = len(engines)

    # ---------------------------------------------------------------- the engine

    def _on_replace(self, server: EngineServer, identities: list[bytes]) -> None:
        until = self._plane.kernel.now + STALL_TIMEOUT_S / self._watch.fastest_clock
        self._replaced.setdefault(server, {}).update(dict.fromkeys(identities, until))

    def _look_at_replaced(self) -> None:
        """Checks that late messages of a connection change nothing in an engine that knows the
        successor of this connection."""
        now = self._plane.kernel.now
        for engine in self._plane.living_engines:
            if engine.server is None or not (replaced := self._replaced.get(engine.server)):
                continue
            for client in connections_of(engine.server) & replaced.keys():
                if now < replaced[client]:
                    self._break(f"{engine.process.name} takes messages of a replaced connection")

    # ---------------------------------------------------------------- the ingress

    def _on_send(self, ingress: SimIngress, engine: EngineId, message: Any) -> None:
        """Checks that a request goes to an engine that its ingress reaches, and that accepts
        requests: an active one, or a leaving one for an answer whose version no other one has."""
        llm = ingress.llm
        if llm is None or not isinstance(message, EngineCoreRequest):
            return
        placer = llm._placer
        member = placer._roster.find(engine.rank, engine.incarnation)
        if engine in placer._unreachable:
            self._break(f"{message.request_id} is sent to an engine that is not reached")
        if member is not None and member.state is MemberState.ACTIVE:
            return
        state = llm._processor.request_states.get(message.request_id)
        version = None if state is None else state.answer_version.required
        is_last = member is not None and member.state is MemberState.LEAVING
        is_last = is_last and version == member.version  # type: ignore[union-attr]
        if not is_last:
            self._break(f"{message.request_id} is sent to an engine that does not accept it")


@contextmanager
def logged_defects() -> Iterator[list[str]]:
    """Yields a list that receives each logged exception which only a defect of the code raises:
    the code goes on after an exception of a peer, and so also after a defect."""
    found: list[str] = []
    names = ("warning", "error", "exception")
    right = {name: getattr(StructuredLogger, name) for name in names}

    def observe(self: StructuredLogger, message: str, *args: Any, **fields: Any) -> None:
        text = f"{message}: {args} {fields}"
        if _DEFECTS.search(text):
            found.append(text)

    for name in names:
        setattr(StructuredLogger, name, observe)
    try:
        yield found
    finally:
        for name, method in right.items():
            setattr(StructuredLogger, name, method)
