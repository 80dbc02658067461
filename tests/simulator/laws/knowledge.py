"""Laws about what processes know of each other: it becomes true in time, and never gets older."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, starmap
from typing import TYPE_CHECKING

from swell.coordinator.wave_protocol.wave_interface import Phase
from swell.coordinator.wire import EngineReport
from swell.engine.serving.server import EngineServer
from tests.simulator.actors import SimCoordinator, weights_of
from tests.simulator.control_plane import HEARTBEAT_S, ControlPlane, SimRequest
from tests.simulator.laws.calm import Calm, Durations
from tests.simulator.model import expected_tokens

if TYPE_CHECKING:
    from tests.simulator.laws.observations.watch import Watch

_VERSION_S = 4.0 * HEARTBEAT_S
"""The time within which the manager must know which versions answers need."""
_FORGOTTEN_S = 10.0 * HEARTBEAT_S
"""The time within which the manager must know that no answer needs a version any more."""
_STATE_S = 3.5 * HEARTBEAT_S
"""The time within which the coordinator and the engines must have the newest state of the
manager."""
_STORED_S = 12.0
"""The time within which it must be stored: attempts come at most 10 s after each other."""
_LOAD_S = 0.6 * HEARTBEAT_S
"""The time within which a change of an engine's load must be known: less than a heartbeat."""
_WEIGHTS = range(3)


class KnowledgeWatch:
    """Checks these laws. `look` must be called several times per virtual second."""

    def __init__(
        self, plane: ControlPlane, watch: Watch, calm: Calm, broken: Callable[[str], None]
    ) -> None:
        self._plane, self._watch, self._calm, self._break = plane, watch, calm, broken
        self._durations = Durations(plane)
        self._kept: dict[EngineServer, tuple[int, tuple[int, int]]] = {}
        """The epoch and the age of the manager's state that each engine keeps."""

    def look(self) -> None:
        coordinator = self._plane.coordinator
        self._look_at_kept()
        if coordinator is not None and self._calm.coordinator_acts:
            self._look_at_loads(coordinator)
            self._look_at_views(coordinator)
            self._look_at_epochs(coordinator)
            if self._calm.manager_acts:
                self._look_at_states(coordinator)
                self._look_at_versions(coordinator)
        self._durations.end_look()

    def _is_over(self, key: object, bound_s: float, *, holds: bool) -> bool:
        return self._durations.held_s(key, holds=holds) > bound_s / self._watch.slowest_clock

    def _look_at_kept(self) -> None:
        """Checks that what an engine keeps for the next coordinator never gets older."""
        for engine in self._plane.living_engines:
            if (server := engine.server) is None:
                continue
            kept = server._coordinator_client._kept
            newest = kept.roster_epoch, kept.manager_state.desired.age
            epoch, age = self._kept.get(server, newest)
            if newest[0] < epoch or newest[1] < age:
                self._break(f"{engine.process.name} goes back to an older state of the manager")
            self._kept[server] = newest

    def _look_at_epochs(self, coordinator: SimCoordinator) -> None:
        """Checks that members know the newest epoch and the newest state of the manager, for the
        next coordinator. An engine that waits until it joins hears of neither."""
        process = self._plane.coordinators[-1][0]
        state = coordinator._state_machine.manager_state
        newest = coordinator.epoch, state.desired.age
        for engine in self._plane.living_engines:
            server = engine.server
            if server is None or server._coordinator_client._address != coordinator.address:
                continue
            if coordinator._state_machine.member(engine.rank, server.incarnation) is None:
                continue
            kept = server._coordinator_client._kept
            is_old = (kept.roster_epoch, kept.manager_state.desired.age) != newest
            is_old = is_old and self._calm.reach(engine.process, process)
            is_old = is_old and not self._calm.were_reset(engine.process, process)
            is_old = is_old and engine.stopped_at is None
            if self._is_over(("kept", server, newest), _STATE_S, holds=is_old):
                self._break(f"{engine.process.name} does not know the newest epoch or state")

    def _look_at_states(self, coordinator: SimCoordinator) -> None:
        """Checks that the coordinator has the newest state of the manager, and that it is
        stored."""
        checkpoints = self._plane.manager.manager._checkpoints
        newest, saved = checkpoints._newest, checkpoints._saved
        known = coordinator._state_machine.manager_state.desired
        key = "state", coordinator, newest.desired.age
        if self._is_over(key, _STATE_S, holds=known != newest.desired):
            self._break("the coordinator does not have the newest state of the manager")
        if self._is_over(("stored", checkpoints), _STORED_S, holds=saved != newest):
            self._break("the newest state of the manager is not stored")

    # ---------------------------------------------------------------- loads

    def _look_at_loads(self, coordinator: SimCoordinator) -> None:
        """Checks that the coordinator knows how many requests each engine has, and that its reports
        come from the current engines."""
        process = self._plane.coordinators[-1][0]
        view = coordinator.machine_view
        members = {member.rank: member.incarnation for member in view.roster.members}
        reports = {report.rank: report for report in view.reports.engines}
        for report in reports.values():
            if report.incarnation != members.get(report.rank):
                self._break(f"the report of engine {report.rank} is one of an earlier engine")
        if self._plane.scenario.expert and not self._all_step(members):
            return  # the other engines wait inside a step
        for engine in self._plane.living_engines:
            server = engine.server
            if server is None or members.get(engine.rank) != server.incarnation:
                continue
            core, seen = server.core, reports.get(engine.rank)
            load = len(core.scheduler.requests) + core.adapters.num_held
            differs = seen is not None and _load_of(seen) != load
            differs = differs and self._calm.reach(engine.process, process)
            differs = differs and not self._calm.were_reset(engine.process, process)
            steps = core.wave_member.phase in (Phase.RUNNING, Phase.STOPPED)
            differs = differs and steps and not engine.executor.hangs
            differs = differs and not engine.executor.worker_lost
            if self._is_over(("load", server, load), _LOAD_S, holds=differs):
                self._break(f"{engine.process.name} has other requests than it has reported")

    def _all_step(self, members: dict[int, int]) -> bool:
        """Returns whether all members live, run, do not hang, and reach each other."""
        living = [engine for engine in self._plane.living_engines if engine.server is not None]
        incarnations = {each.server.incarnation for each in living if each.server is not None}
        processes = [each.process for each in living]
        return (
            incarnations >= {*members.values()}
            and not any(each.executor.hangs for each in living)
            and all(each.runs for each in processes)
            and all(starmap(self._calm.reach, combinations(processes, 2)))
        )

    def _look_at_views(self, coordinator: SimCoordinator) -> None:
        """Checks that an ingress knows the loads that the coordinator knows."""
        process = self._plane.coordinators[-1][0]
        reports = coordinator.machine_view.reports.engines
        known = _loads(reports)
        # A load that changes and returns between two looks is another one.
        steps = tuple(report.steps for report in reports)
        for ingress in self._plane.ingresses:
            if ingress.llm is None or ingress.coordinator_address != coordinator.address:
                continue
            view = ingress.llm.view
            differs = (
                view.roster.epoch == coordinator.epoch and _loads(view.reports.engines) != known
            )
            differs = differs and self._calm.reach(ingress.process, process)
            differs = differs and not self._calm.were_reset(ingress.process, process)
            key = "loads", ingress, tuple(known.items()), steps
            if self._is_over(key, _LOAD_S, holds=differs):
                self._break(f"{ingress.process.name} does not know the loads")

    # ---------------------------------------------------------------- versions

    def _look_at_versions(self, coordinator: SimCoordinator) -> None:
        """Checks that the manager knows exactly the versions that unfinished answers need. The
        tokens received so far tell the version of an answer."""
        plane, calm = self._plane, self._calm
        process = plane.coordinators[-1][0]
        needed = {weights_of(version) for version in plane.manager.manager.upgrader._needed}
        running: set[int] = set()
        is_known = True
        for ingress in plane.ingresses:
            llm = ingress.llm
            is_known &= llm is not None and calm.reach(ingress.process, process)
            if llm is None or ingress.coordinator_address != coordinator.address:
                is_known = False
                continue
            for request in ingress.requests:
                weights = _weights_of(request)
                running |= weights
                waits = len(weights) == 1 and not weights & needed
                waits = waits and calm.reach(ingress.process, process)
                waits = waits and not calm.calls_were_lost
                if self._is_over(("needed", request), _VERSION_S, holds=waits):
                    self._break(f"nobody knows that r{request.number} needs its version")
        for unused in needed - running:
            if self._is_over(("forgotten", unused), _FORGOTTEN_S, holds=is_known):
                self._break("a version counts as needed, and no answer needs it")


def _load_of(report: EngineReport) -> int:
    return report.running + report.waiting


def _loads(reports: Iterable[EngineReport]) -> dict[int, int]:
    return {report.rank: _load_of(report) for report in reports}


def _weights_of(request: SimRequest) -> set[int]:
    """Returns the weights that may have produced an unfinished answer: all, until its first
    token."""
    if request.end is not None:
        return set()
    tokens, asked = request.token_ids, request.request
    return {
        weights
        for weights in _WEIGHTS
        if expected_tokens(asked.prompt, len(tokens), asked.seed, weights) == tokens
    }
