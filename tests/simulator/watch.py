"""What must hold all the time: a look at everything, several times a virtual second.

Bounds count from the beginning of the last fault, the last answer to an operator, and the moment
since which an ingress reaches an engine that could serve. A clock at half the rate doubles them.
"""

from __future__ import annotations

from swell.coordinator.wire import ClusterView
from tests.simulator.actors import SimEngine
from tests.simulator.control_plane import (
    HEARTBEAT_S,
    STALL_TIMEOUT_S,
    ControlPlane,
    SimIngress,
    SimRequest,
)
from tests.simulator.faults import FaultInjector
from tests.simulator.process import Process

LOOK_S = 0.25
"""Between two looks."""
SILENCE_S = STALL_TIMEOUT_S + 3 * HEARTBEAT_S
"""Until what was lost with a host, or with a path to it, continues elsewhere."""
STUCK_S = 2 * STALL_TIMEOUT_S + 3 * HEARTBEAT_S
"""Longer by this for each engine that hangs: it is heard of and does not compute, and it is known
twice the time after it got work (`engine_monitor.py`). A request may get from one to another."""
_COMPUTE_S = 2.0
"""Of the longest request."""
_LOSS_S = 2 * HEARTBEAT_S
"""Until the loss of a connection's messages is noticed, and the engine knows."""
_BRIEF_S = 0.4 * STALL_TIMEOUT_S
"""A disturbance of less is no reason to end an engine."""
_EXCUSED_S = 2 * STALL_TIMEOUT_S
"""After a longer one: its engine may be ended as long after it."""

_SHRINK_S = 20.0
"""Engines that are not wanted any more have gone by then."""


class Watch:
    """Collects what it has seen broken, each thing once."""

    def __init__(self, plane: ControlPlane, faults: FaultInjector) -> None:
        self._plane, self._faults, self._kernel = plane, faults, plane.kernel
        self.broken: dict[str, None] = {}
        self.slowest_s = 0.0
        """Of all requests: the time after its bound began until it had ended."""
        self._served_since: dict[SimIngress, float] = {}
        self._unended: dict[SimRequest, None] = dict.fromkeys(plane.requests)
        self._unawaited: dict[tuple[Process, bytes, str, int], tuple[float, int]] = {}
        """Requests that an engine has, and nobody awaits: since when, and its steps then."""
        self._disturbed: dict[Process, tuple[float, float]] = {}
        """Engines that did not reach the coordinator, or did not run: from, until."""
        self._epochs: dict[SimIngress, int] = {}
        plane.ray.on_end.append(self._on_end)
        plane.on_view.append(self._on_view)

    def look(self) -> None:
        self._look_at_paths()
        self._look_at_requests()
        self._look_at_engines()

    def _break(self, law: str) -> None:
        self.broken.setdefault(law)

    # ---------------------------------------------------------------- each request ends in time

    def could_serve(self, ingress: SimIngress, engine: SimEngine) -> bool:
        """The engine runs, and the ingress reaches it and knows it."""
        server, net = engine.server, self._plane.net
        if server is None or not engine.process.runs or engine.executor.hangs:
            return False
        if ingress.llm is None or not ingress.process.runs:
            return False
        if net.is_blocked(ingress.process.host, engine.process.host):
            return False
        member = ingress.llm.view.roster.find(engine.rank, server.incarnation)
        return member is not None and engine.rank in ingress.llm.active_ranks

    def _look_at_paths(self) -> None:
        engines = self._plane.living_engines
        for ingress in self._plane.ingresses:
            if any(self.could_serve(ingress, engine) for engine in engines):
                self._served_since.setdefault(ingress, self._kernel.now)
            else:
                self._served_since.pop(ingress, None)

    def _look_at_requests(self) -> None:
        if self._plane.operator.paused is not False:
            return
        now, faults = self._kernel.now, self._faults
        over = max(faults.begun_at, self._plane.operator.changed_at)
        bound_s = SILENCE_S + faults.num_hangs * STUCK_S
        for each in list(self._unended):
            since = self._served_since.get(self._plane.ingresses[each.request.ingress])
            if since is None:
                continue
            taken_s = now - max(over, since, each.request.at)
            if each.end is not None:
                del self._unended[each]
            elif taken_s > bound_s / faults.slowest_clock + _COMPUTE_S:
                self._break(f"r{each.number} is late")
            self.slowest_s = max(self.slowest_s, taken_s)

    # ---------------------------------------------------------------- nothing is computed in vain

    def _look_at_engines(self) -> None:
        now, faults, awaited = self._kernel.now, self._faults, self._awaited()
        bound_s = SILENCE_S if faults.kinds - {"drop"} else _LOSS_S if faults.kinds else LOOK_S
        seen, before = {}, self._unawaited
        for engine in self._plane.living_engines:
            self._note_disturbance(engine)
            if engine.server is None:
                continue
            steps = engine.server.core.num_steps
            for request in engine.server.core.scheduler.requests.values():
                attempt = (request.request_id, request.attempt)
                if attempt in awaited:
                    continue
                key = (engine.process, request.client, *attempt)
                since, first = seen[key] = before.get(key, (now, steps))
                if now - since > bound_s / faults.slowest_clock and steps > first:
                    self._break(f"{engine.process.name} computes {attempt}, which nobody awaits")
        self._unawaited = seen

    def _awaited(self) -> set[tuple[str, int]]:
        return {
            (state.request_id, state.attempt)
            for ingress in self._plane.ingresses
            if ingress.llm is not None and ingress.process.alive
            for state in ingress.llm._processor.request_states.values()
        }

    # ---------------------------------------------------------------- nobody healthy is ended

    def _is_disturbed(self, engine: SimEngine) -> bool:
        """It does not run, or does not reach the coordinator, or the head, which ends it then."""
        process, plane = engine.process, self._plane
        if plane.coordinator is None or not process.runs or engine.executor.hangs:
            return True
        hosts = (plane.coordinators[-1][0].host, plane.ray.head)
        return any(plane.net.is_blocked(process.host, host) for host in hosts)

    def _note_disturbance(self, engine: SimEngine) -> None:
        if not self._is_disturbed(engine):
            return
        now = self._kernel.now
        begun, until = self._disturbed.get(engine.process, (now, now))
        if now - until > _EXCUSED_S or (until < now - 2 * LOOK_S and until - begun < _BRIEF_S):
            begun = now
        self._disturbed[engine.process] = (begun, now)

    def _is_excused(self, engine: SimEngine) -> bool:
        """It was disturbed for long, and not long ago."""
        begun, until = self._disturbed.get(engine.process, (0.0, 0.0))
        was_long = until - begun > _BRIEF_S and self._kernel.now - until < _EXCUSED_S
        return was_long or engine.executor.hangs

    def _on_end(self, process: Process) -> None:
        """A manager ends an actor. More than are wanted may be ended; which ones, while an operator
        has just asked for fewer, it decides by what it knows."""
        if self._kernel.now - self._plane.operator.shrunk_at < _SHRINK_S:
            return
        staying = [each for each in self._plane.living_engines if not self._is_excused(each)]
        ended = [each for each in staying if each.process is process]
        if (
            ended
            and not self._is_disturbed(ended[0])
            and len(staying) <= min(self._plane.operator.wanted)
        ):
            self._break(f"{process.name} was ended at {self._kernel.now:.2f} s, and was healthy")

    # ---------------------------------------------------------------- epochs never fall

    def _on_view(self, ingress: SimIngress, view: ClusterView) -> None:
        epoch = view.roster.epoch
        if epoch < self._epochs.get(ingress, 0):
            self._break(f"{ingress.process.name} falls back to epoch {epoch}")
        self._epochs[ingress] = epoch
