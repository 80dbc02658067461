"""Records which engines were disturbed: only these may count as lost."""

from __future__ import annotations

from swell.engine.serving.server import EngineServer
from tests.simulator.actors import SimEngine
from tests.simulator.control_plane import HEARTBEAT_S, STALL_TIMEOUT_S, ControlPlane
from tests.simulator.faults import FaultInjector
from tests.simulator.kernel.process import Process
from tests.simulator.laws.calm import Calm
from tests.simulator.simulated_ray.ray import RayOptions

LOOK_S = 0.25
"""Seconds between two looks."""
_SILENT_S = STALL_TIMEOUT_S + 3 * HEARTBEAT_S
"""The time within which an engine has noticed that its coordinator is silent, and has looked for
another one."""
_FIRST_S = 0.25 * STALL_TIMEOUT_S + 1.5 * HEARTBEAT_S
"""The same for an engine that has never heard a coordinator: see `finder.py`."""
_START_S = 1.5 * RayOptions.start_s + LOOK_S
"""The longest time from when Ray gives up a coordinator until a look sees its successor."""
_TOGETHER_S = 2 * HEARTBEAT_S
"""Engines that lose their coordinator at most this long after each other find the next one before
its recovery ends."""
_EXCUSED_S = 2 * STALL_TIMEOUT_S
"""The time after a long disturbance within which its engine may be killed because of it."""


class Disturbances:
    """The disturbances of all engines. `look` must be called several times per virtual second,
    after `Calm.look`."""

    def __init__(self, plane: ControlPlane, faults: FaultInjector, calm: Calm) -> None:
        self._plane, self._faults, self._kernel = plane, faults, plane.kernel
        self._calm = calm
        self._disturbed: dict[Process, tuple[float, float]] = {}
        """For each engine that did not run or did not reach the coordinator: start and end of the
        disturbance."""
        self._missed: dict[Process, float] = {}
        """For each engine that was disturbed, or whose packets may have been late, while a new
        coordinator waited for its messages: when, at the latest."""
        self._coordinators: dict[Process, tuple[float, float]] = {}
        """When each coordinator was alive: from, until."""
        self._reached_at: dict[tuple[Process, Process], float] = {}
        """Coordinator and engine -> when the engine last reached it while it followed it."""
        self._served_at: dict[EngineServer, float] = {}
        """When each engine was first seen to serve."""

    def is_disturbed(self, engine: SimEngine) -> bool:
        """Returns whether the engine does not run, hangs, does not reach the coordinator, an engine
        of its group or the head (which then kills it), or cannot know that there is another
        coordinator."""
        process, plane = engine.process, self._plane
        if not process.runs or engine.executor.hangs or plane.coordinator is None:
            return True
        if self._faults.are_severed(process, plane.coordinators[-1][0]):
            return True
        if self.follows_an_earlier_coordinator(engine):
            return True
        if not (net := plane.net).cuts:
            return False
        hosts = [plane.coordinators[-1][0].host, plane.ray.head]
        ranks = plane.coordinator.group_ranks
        hosts += [peer.process.host for peer in plane.living_engines if peer.rank in ranks]
        return any(net.is_blocked(process.host, host) for host in hosts)

    def follows_an_earlier_coordinator(self, engine: SimEngine) -> bool:
        """Returns whether the engine follows an earlier coordinator, at another address, whose
        silence it can notice only later than the newest one expects. The earlier one was still
        alive when Ray gave up its host and began to start the newest one. Or another engine was cut
        off from the earlier one before: it introduces itself first, and the newest one ends its
        recovery as if all engines had noticed the silence at the same time. Or the engine has just
        begun to serve, with the address that an earlier manager gave it before it loaded."""
        *earlier, (newest, service) = self._plane.coordinators
        if engine.server is None or newest not in self._coordinators:
            return False
        followed, now = engine.server._coordinator_client._address, self._kernel.now
        if followed == service.address:
            return False
        served_s = now - self._served_at.get(engine.server, now)
        if served_s < _FIRST_S / self._faults.slowest_clock:
            return True
        begun, _ = self._coordinators[newest]
        given_up = begun - _START_S
        for process, each in earlier:
            _, until = self._coordinators.get(process, (0.0, 0.0))
            is_unnoticed = now - until < _SILENT_S / self._faults.slowest_clock
            if each.address != followed or not is_unnoticed:
                continue
            if until >= given_up or self._was_cut_off_later(engine, process):
                return True
        return False

    def _was_cut_off_later(self, engine: SimEngine, coordinator: Process) -> bool:
        """Returns whether another engine had not reached the coordinator for some heartbeats when
        this one last reached it."""
        all_at = {
            own: at for (led_by, own), at in self._reached_at.items() if led_by is coordinator
        }
        own_at = all_at.get(engine.process, 0.0)
        return own_at - min(all_at.values(), default=own_at) > _TOGETHER_S

    def look(self, engines: list[SimEngine]) -> None:
        """Records disturbances. A decision about an engine cannot be carried out while Ray's GCS is
        unavailable or the manager does not act, or while the manager waits for other engines that
        join with it, so an engine stays excused during that time."""
        now = self._kernel.now
        for process in [each for each, _ in self._plane.coordinators if each.alive]:
            self._coordinators[process] = self._coordinators.get(process, (now, now))[0], now
        newest = self._plane.coordinator
        for engine in engines:
            self._note_reached(engine)
            if newest is not None and newest._recovering:
                is_late = self._calm.is_late(engine.process, self._plane.coordinators[-1][0])
                if is_late or self.is_disturbed(engine):
                    self._missed[engine.process] = now
            is_postponed = self._plane.ray.away or not self._calm.manager_acts
            is_postponed = is_postponed or self._is_called_off(engine)
            if (is_postponed and self.is_excused(engine)) or self.is_disturbed(engine):
                self._note(engine)

    def _is_called_off(self, engine: SimEngine) -> bool:
        """Returns whether the coordinator has called off the join of the engine, and the manager
        does not know it yet: it learns the result of all engines that join at once together."""
        handle = self._plane.manager.manager._fleet.starting.get(engine.rank)
        if handle is None or not handle.in_transition or self._plane.coordinator is None:
            return False
        is_own = engine.process.name.startswith(f"{handle.name}.")
        return is_own and engine.rank in self._plane.coordinator._state_machine.called_off

    def _note_reached(self, engine: SimEngine) -> None:
        if engine.server is None:
            return
        self._served_at.setdefault(engine.server, self._kernel.now)
        followed = engine.server._coordinator_client._address
        for process, each in self._plane.coordinators:
            if each.address == followed and self._calm.reach(process, engine.process):
                self._reached_at[process, engine.process] = self._kernel.now

    def was_ever_disturbed(self, engine: SimEngine) -> bool:
        return engine.process in self._disturbed or engine.process in self._missed

    def _note(self, engine: SimEngine) -> None:
        now = self._kernel.now
        begun, until = self._disturbed.get(engine.process, (now, now))
        is_over = until < now - 2 * LOOK_S and until - begun < self._brief_s
        if now - until > _EXCUSED_S or is_over:
            begun = now
        self._disturbed[engine.process] = (begun, now)

    @property
    def _brief_s(self) -> float:
        """The longest disturbance that is not a reason to kill an engine. What it sends meanwhile
        may arrive after twice the time of the disturbance, and a heartbeat after its previous
        message; two looks may each miss up to `LOOK_S`."""
        faults = self._faults
        silence_s = STALL_TIMEOUT_S / faults.fastest_clock - HEARTBEAT_S / faults.slowest_clock
        return silence_s / 2 - 2 * LOOK_S

    def is_excused(self, engine: SimEngine) -> bool:
        """Returns whether the engine hangs, or was recently disturbed for long, or while a new
        coordinator waited for its messages."""
        begun, until = self._disturbed.get(engine.process, (0.0, 0.0))
        was_long = until - begun > self._brief_s and self._kernel.now - until < _EXCUSED_S
        missed_at = self._missed.get(engine.process, -_EXCUSED_S)
        is_missed = self._kernel.now - missed_at < _EXCUSED_S
        return was_long or is_missed or engine.executor.hangs
