"""Records which state transitions the runs have made: random schedules find no bug in a state that
they never reach. `python -m tests.simulator --coverage` prints the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from itertools import permutations

from swell.cluster.client.requests.request_state import MigrationReason
from swell.cluster.control.manager import ClusterManager
from swell.cluster.control.plan.control_state import ChangeStage
from swell.cluster.control.plan.fleet_view import Intent, Place
from swell.cluster.control.plan.versions import UpgradeStage
from swell.coordinator.roster import MemberState
from swell.coordinator.wave_protocol.wave_interface import GroupState, Phase
from swell.coordinator.wire import ClusterView
from swell.engine.wire import JourneyEventType
from tests.simulator.actors import SimCoordinator
from tests.simulator.control_plane import ControlPlane, SimIngress
from tests.simulator.faults import FAULTS

_ABSENT = "absent"
_KEPT = "detached engine: is kept"

_SERVING = [f"{Place.SERVING.value} ({intent.value})" for intent in Intent]
_STARTING = [f"{Place.STARTING.value} ({intent.value})" for intent in (Intent.STAY, Intent.LEAVE)]

POSSIBLE = frozenset(
    [f"fault {kind}" for kind in FAULTS]
    + [f"request moves: {reason}" for reason in MigrationReason]
    + [f"upgrade: {stage}" for stage in UpgradeStage]
    + [f"group: {state}" for state in GroupState]
    + [f"new coordinator: group was {state}" for state in GroupState]
    + [f"new manager: change was {stage.value}" for stage in ChangeStage]
    + [f"new manager: upgrade was {stage}" for stage in UpgradeStage]
    + [f"new manager: engine was {place}" for place in (*_SERVING, *_STARTING)]
    + [f"handle: {before} > {after}" for before, after in permutations(_SERVING, 2)]
    + [_KEPT]
    + [f"engine: {phase.name.lower()}" for phase in Phase]
    + [
        f"member: {before} > {after}"
        for before in (_ABSENT, *MemberState)
        for after in (_ABSENT, *MemberState)
        if before != after
    ]
)
"""Transitions that are expected to occur; other recorded transitions are printed, too."""


class Transitions:
    """The transitions of one run. `look` must be called several times per virtual second."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.seen: set[str] = set()
        self._states: dict[Hashable, str] = {}
        self._members: dict[SimIngress, dict[int, str]] = {}
        self._coordinator: SimCoordinator | None = None
        self._manager: ClusterManager | None = None
        self._detached: frozenset[int] = frozenset()
        """The ranks that the coordinator was about to remove at the last look."""
        self._handles: dict[str, str] = {}
        """The places and intents of the engines of the manager at the last look, by name."""
        plane.on_view.append(self._on_view)
        plane.on_keep.append(self._on_keep)

    def look(self) -> None:
        plane = self._plane
        if plane.coordinator is not None:
            self._look_at_coordinator(plane.coordinator)
        if plane.manager.has_started:
            self._look_at_manager(plane.manager.manager)
        for engine in plane.living_engines:
            if engine.server is not None:
                phase = engine.server.core.wave_member.phase.name.lower()
                self._note("engine", engine, phase)

    def _look_at_coordinator(self, coordinator: SimCoordinator) -> None:
        if coordinator is not self._coordinator and self._coordinator is not None:
            self.seen.add(f"new coordinator: group was {self._states['group', self._coordinator]}")
        self._coordinator = coordinator
        self._detached = frozenset(coordinator._state_machine.detached)
        self._note("group", coordinator, coordinator.machine_view.reports.state)

    def _look_at_manager(self, manager: ClusterManager) -> None:
        if manager is not self._manager and self._manager is not None:
            for what in ("change", "upgrade"):
                self.seen.add(f"new manager: {what} was {self._states[what, self._manager]}")
            self.seen |= {f"new manager: engine was {place}" for place in self._handles.values()}
        self._manager = manager
        self._note("change", manager, manager._state.change.stage.value)
        self._note("upgrade", manager, str(manager.upgrader.record.stage))
        fleet, self._handles = manager._fleet, {}
        tables = (
            (Place.STARTING, fleet.starting),
            (Place.SERVING, fleet.engines),
            (Place.ENDING, fleet.ending),
        )
        for place, table in tables:
            for handle in table.values():
                self._handles[handle.name] = state = f"{place.value} ({handle.intent.value})"
                self._note("handle", handle.name, state)

    def _on_keep(self, ranks: list[int]) -> None:
        if not self._detached.isdisjoint(ranks):
            self.seen.add(_KEPT)

    def _note(self, what: str, whose: Hashable, state: str) -> None:
        key = what, whose
        before = self._states.get(key)
        self.seen.add(f"{what}: {state}")
        if before not in (None, state):
            self.seen.add(f"{what}: {before} > {state}")
        self._states[key] = state

    def _on_view(self, ingress: SimIngress, view: ClusterView) -> None:
        after = {member.incarnation: str(member.state) for member in view.roster.members}
        before = self._members.get(ingress, {})
        for incarnation in before.keys() | after.keys():
            old, new = before.get(incarnation, _ABSENT), after.get(incarnation, _ABSENT)
            if old != new:
                self.seen.add(f"member: {old} > {new}")
        self._members[ingress] = after

    def finish(self, happened: list[str]) -> set[str]:
        """Returns all recorded transitions. `happened`: the faults of the run, one line each."""
        self.seen |= {f"fault {line.split()[1]}" for line in happened}
        for request in self._plane.requests:
            for event in request.state.journey.events if request.state is not None else ():
                if event.kind is JourneyEventType.RESUBMITTED and event.reason is not None:
                    self.seen.add(f"request moves: {event.reason}")
        return self.seen


def table(counts: Counter[str], num_runs: int) -> Iterator[str]:
    """Returns a line for each transition with the number of runs that made it; transitions that no
    run made come last."""
    for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        yield f"{count:7} {100 * count / num_runs:5.1f} %  {name}"
    for name in sorted(POSSIBLE - counts.keys()):
        yield f"  never           {name}"
