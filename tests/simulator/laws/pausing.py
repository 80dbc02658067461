"""Laws about a pause by an operator: every engine stops, sleeps as deeply as requested, and serves
again afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from swell.coordinator.roster import MemberState
from swell.coordinator.wave_protocol.wave_interface import Phase
from tests.simulator.actors import SimCoordinator, SimEngine
from tests.simulator.control_plane import HEARTBEAT_S, ControlPlane
from tests.simulator.laws.calm import Calm, Durations

if TYPE_CHECKING:
    from tests.simulator.laws.observations.watch import Watch

_PAUSED_S = 5.0 * HEARTBEAT_S
"""The time within which all engines have stopped, and sleep."""
_RESUMED_S = 5.0 * HEARTBEAT_S + 3.0
"""The time within which all engines serve again: some must wake up."""


class PausingWatch:
    """Checks these laws. `look` must be called several times per virtual second."""

    def __init__(
        self, plane: ControlPlane, watch: Watch, calm: Calm, broken: Callable[[str], None]
    ) -> None:
        self._plane, self._watch, self._calm, self._break = plane, watch, calm, broken
        self._durations = Durations(plane)

    def look(self) -> None:
        coordinator, paused = self._plane.coordinator, self._plane.operator.paused
        is_calm = self._calm.coordinator_acts and self._calm.manager_acts
        if coordinator is not None and is_calm and paused is not None:
            for engine in self._plane.living_engines if self._may_agree else ():
                if self._follows(engine, coordinator):
                    (self._look_at_paused if paused else self._look_at_resumed)(engine)
        self._durations.end_look()

    def _is_over(self, key: object, bound_s: float, *, holds: bool) -> bool:
        return self._durations.held_s(key, holds=holds) > bound_s / self._watch.slowest_clock

    @property
    def _may_agree(self) -> bool:
        """Whether engines can stop: those that share experts stop together."""
        if not self._plane.scenario.expert:
            return True
        coordinator = self._plane.coordinator
        assert coordinator is not None
        return (
            coordinator._state_machine.is_stable
            and not self._plane.net.cuts
            and all(
                engine.process.runs and not (engine.executor.hangs or engine.executor.worker_lost)
                for engine in self._plane.living_engines
            )
        )

    def _follows(self, engine: SimEngine, coordinator: SimCoordinator) -> bool:
        """Returns whether the engine is a member, computes, and receives what the coordinator
        sends."""
        server, executor = engine.server, engine.executor
        if server is None or executor.hangs or executor.worker_lost or executor.is_repairing:
            return False
        member = coordinator._state_machine.roster.find(engine.rank, server.incarnation)
        if member is None or member.state is MemberState.REPAIRING:
            return False
        process = self._plane.coordinators[-1][0]
        return (
            server._coordinator_client._address == coordinator.address
            and self._calm.reach(engine.process, process)
            and not self._calm.were_reset(engine.process, process)
        )

    def _look_at_paused(self, engine: SimEngine) -> None:
        """Checks that an engine stops during a pause, and sleeps as deeply as requested."""
        assert engine.server is not None
        waves, memory = engine.server.core.wave_member, engine.server.core.memory
        computes = waves.phase is not Phase.PAUSED
        if self._is_over(("paused", engine), _PAUSED_S, holds=computes):
            self._break(f"{engine.process.name} computes during a pause")
        level = 0 if waves.lockstep else self._plane.manager.manager._state.sleep.level
        is_awake = memory.sleep_level < level
        if self._is_over(("asleep", engine, level), _PAUSED_S, holds=is_awake):
            self._break(f"{engine.process.name} does not sleep as deeply as requested")

    def _look_at_resumed(self, engine: SimEngine) -> None:
        """Checks that an engine serves again after a pause."""
        assert engine.server is not None
        core = engine.server.core
        if not core.wave_member.lockstep:
            rests = core.wave_member.phase is Phase.PAUSED or core.memory.sleep_level > 0
            if self._is_over(("resumed", engine), _RESUMED_S, holds=rests):
                self._break(f"{engine.process.name} is paused, and nobody has paused it")
