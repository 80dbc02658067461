"""Checks `/ready`: when nothing has changed for a while, an ingress answers a request if and only
if it reports that it is ready."""

from __future__ import annotations

from functools import partial

from swell.coordinator.wave_protocol.wave_interface import GroupState
from tests.simulator.control_plane import (
    HEARTBEAT_S,
    STALL_TIMEOUT_S,
    ControlPlane,
    SimIngress,
    SimRequest,
)
from tests.simulator.faults import FaultInjector
from tests.simulator.kernel.kernel import WORLD
from tests.simulator.scenario import Request

QUIET_S = STALL_TIMEOUT_S + 3 * HEARTBEAT_S
"""The time after which an ingress knows that an engine makes no progress. Three periods follow each
other: the engine reports its last step, the coordinator publishes the report, and the ingress
counts the time from then on until another view arrives, because a view may be old."""
_ANSWER_S = 1.5
"""The time within which a probe is answered if any engine computes it."""
_FIRST_NUMBER = 1000


class Prober:
    """Sends one request to each ingress whenever nothing has changed for `QUIET_S`. If something
    changes before the answer, the probe is not compared."""

    def __init__(self, plane: ControlPlane, faults: FaultInjector) -> None:
        self._plane, self._faults, self._kernel = plane, faults, plane.kernel
        self.broken: list[str] = []
        self.num_compared: dict[bool, int] = {True: 0, False: 0}
        """Number of compared probes, by whether the ingress was ready."""
        self._changed_at = 0.0
        self._state: object = None
        self._probed = False
        self._number = _FIRST_NUMBER
        self._probes: dict[SimIngress, SimRequest] = {}

    @property
    def is_under_way(self) -> bool:
        return bool(self._probes)

    def look(self) -> None:
        """Must be called several times per virtual second."""
        if (state := self._get_state()) != self._state:
            self._state, self._changed_at, self._probed = state, self._kernel.now, False
        quiet_s = (self._kernel.now - self._changed_at) * self._faults.slowest_clock
        if not self._probed and quiet_s > QUIET_S and self._is_comparable():
            self._probed = True
            for ingress in self._plane.ingresses:
                self._begin(ingress)

    def _get_state(self) -> object:
        """Returns everything on which readiness depends."""
        plane = self._plane
        net, coordinator = plane.net, plane.coordinator
        views = [
            (i.process.name, i.llm and (i.llm.view.roster.epoch, tuple(i.llm.active_ranks)))
            for i in plane.ingresses
        ]
        return (
            len(self._faults.happened),
            set(net.cuts),
            set(net.slow_hosts),
            set(net.lossy_hosts),
            plane.operator.changed_at,
            [2 * p.alive + p.stopped for p in plane.ray.processes.values()],
            coordinator and (coordinator.group_ranks, coordinator.group_state),
            views,
        )

    def _is_comparable(self) -> bool:
        """Returns whether probes can be compared now. Nobody can know that an idle engine hangs,
        or whether a group steps that does not pause because an engine does not hear the
        coordinator, and slow engines answer late."""
        plane = self._plane
        return not (
            any(engine.executor.hangs for engine in plane.living_engines)
            or self._is_pause_unheard()
            or plane.operator.paused is None
            or plane.net.slow_hosts
            or plane.net.lossy_hosts
            or any(ingress.process.stopped for ingress in plane.ingresses)
        )

    def _is_pause_unheard(self) -> bool:
        plane = self._plane
        coordinator = plane.coordinator
        if coordinator is None or coordinator.group_state is not GroupState.PAUSING:
            return False
        own = plane.coordinators[-1][0].host
        group = [each for each in plane.living_engines if each.rank in coordinator.group_ranks]
        return any(plane.net.is_cut(own, engine.process.host) for engine in group)

    def _begin(self, ingress: SimIngress) -> None:
        if ingress.llm is None or not ingress.process.runs or not ingress.llm.has_seen_engine:
            return
        ready = ingress.llm.check_ready()
        knows_pause = ingress.llm._readiness._state == "paused"
        if ready.coordinator_silent and knows_pause != self._plane.operator.paused:
            return  # only the coordinator can say that the engines were paused or resumed
        self._number += 1
        request = Request(self._kernel.now, ingress.index, (self._number % 50,), 2, 0)
        probe = self._probes[ingress] = SimRequest(self._number, request)
        ingress.submit(probe)
        at = self._kernel.now + _ANSWER_S
        self._kernel.at(at, WORLD, self._compare, ingress, probe, bool(ready.ranks), self._state)

    def _compare(
        self, ingress: SimIngress, probe: SimRequest, is_ready: bool, state: object
    ) -> None:
        del self._probes[ingress]
        if self._get_state() == state:
            self.num_compared[is_ready] += 1
            if (probe.end == "length") != is_ready:
                what = "is ready, and does not answer" if is_ready else "answers, and is not ready"
                self.broken.append(f"{ingress.process.name} {what}")
        if probe.end is None and ingress.llm is not None and ingress.process.alive:
            abort = partial(ingress.llm.abort, [f"r{probe.number}"])
            self._kernel.soon(ingress.process, abort)
