"""What must hold all the time: a look at everything, several times a virtual second.

Bounds count from the beginning of the last fault, the last answer to an operator, and the moment
since which an ingress reaches an engine that could serve. A clock at half the rate doubles them.
"""

from __future__ import annotations

from swell.coordinator.roster import MemberState
from swell.coordinator.wave_protocol.wave_interface import Phase
from swell.coordinator.wire import ClusterView
from swell.engine.serving.server import EngineServer
from tests.simulator.actors import SimEngine
from tests.simulator.calm import Calm
from tests.simulator.control_plane import (
    DRAIN_TIMEOUT_S,
    HEARTBEAT_S,
    STALL_TIMEOUT_S,
    ControlPlane,
    SimIngress,
    SimRequest,
)
from tests.simulator.disturbances import LOOK_S, Disturbances
from tests.simulator.faults import FaultInjector
from tests.simulator.knowledge import KnowledgeWatch
from tests.simulator.membership import MembershipWatch
from tests.simulator.process import Process

SILENCE_S = STALL_TIMEOUT_S + 3 * HEARTBEAT_S
"""Until what was lost with a host, or with a path to it, continues elsewhere."""
_DEATH_S = 3.0
"""Until what was lost with an engine alone continues elsewhere."""
STUCK_S = 2 * STALL_TIMEOUT_S + 3 * HEARTBEAT_S
"""Longer by this for each engine that hangs: it is heard of and does not compute, and it is known
twice the time after it got work (`engine_monitor.py`). A request may get from one to another."""
_COMPUTE_S, _COMPUTE_STEPS = 1.5, 1.5
"""Of a request, in all and for each of its tokens."""
_LOSS_S = 2 * HEARTBEAT_S
"""Until the loss of a connection's messages is noticed, and the engine knows."""
_RETRANSMISSIONS_S = 2.5
"""Of two messages in a row, or more of them."""
_SHRINK_S = 20.0
"""Engines that are not wanted any more have gone by then."""


class Watch:
    """Collects what it has seen broken, each thing once."""

    def __init__(self, plane: ControlPlane, faults: FaultInjector) -> None:
        self._plane, self._faults, self._kernel = plane, faults, plane.kernel
        self.broken: dict[str, None] = {}
        self.slowest_s = 0.0
        """Of all requests: the time after its bound began until it had ended."""
        self._served_since: dict[tuple[SimIngress, str | None], float] = {}
        """Of each version, and of any one."""
        self._unended: dict[SimRequest, tuple[str | None, float]] = {
            each: (None, each.request.at) for each in plane.requests
        }
        """The version that each one's answer needs (None: any, since it has not begun), and since
        when."""
        self._unawaited: dict[tuple[Process, bytes, str, int], tuple[float, int]] = {}
        """Requests that an engine has, and nobody awaits: for how long it has computed since, and
        its steps at the last look."""
        self._disturbances = Disturbances(plane, faults)
        self.leaving: dict[Process, float] = {}
        """Engines that an operator wants no more, as the coordinator knew last, and since when."""
        self._staying: dict[tuple[str, int], float] = {}
        """Requests, with the number of the attempt, that could be elsewhere than at an engine that
        is not reached, and since when."""
        self._moved_at = 0.0
        """Engines that share experts left a host that is taken away, while packets were lost, until
        then: each change of the groups waits for packets that come again."""
        self._epochs: dict[SimIngress, int] = {}
        plane.ray.on_end.append(self._on_end)
        plane.on_view.append(self._on_view)
        plane.on_leave.append(self._on_leave)
        plane.on_detach.append(self._on_detach)
        self._calm = Calm(plane, faults)
        self._membership = MembershipWatch(plane, self, self._calm, self._break)
        self._knowledge = KnowledgeWatch(plane, self, self._calm, self._break)

    def look(self) -> None:
        self._calm.look()
        engines = self._plane.living_engines
        self._look_at_requests(engines)
        self._look_at_engines(engines)
        self._disturbances.look(engines)
        self._look_at_roster(engines)
        self._look_at_pause()
        self._look_at_placements()
        self._membership.look()
        self._knowledge.look()

    @property
    def slowest_clock(self) -> float:
        return self._faults.slowest_clock

    def may_lose(self, engine: SimEngine) -> bool:
        """It is disturbed, or was, so that it may be taken for lost."""
        return self._disturbances.is_disturbed(engine) or self._disturbances.is_excused(engine)

    @property
    def _only_engines_died(self) -> bool:
        """Ray tells the manager, which tells the coordinator, which tells the ingresses."""
        were_killed = {line.split()[2] for line in self._faults.happened}
        return self._faults.kinds <= {"kill", "poison"} and all(
            name.startswith("sim-engine") for name in were_killed
        )

    @property
    def hang_s(self) -> float:
        """How long what hangs may hold up the others. A group that does not form is formed once
        more before it is said who hangs."""
        return self._faults.num_hangs * STUCK_S * (2 if self._plane.scenario.expert else 1)

    def _break(self, law: str) -> None:
        self.broken.setdefault(law)

    # ---------------------------------------------------------------- each request ends in time

    def _look_at_paths(self, engines: list[SimEngine]) -> None:
        """Each path once: an ingress that reaches an engine may use it for several versions."""
        able = [engine for engine in engines if self._could_serve(engine)]
        versions = (None, *dict.fromkeys([engine.version() for engine in self._plane.engines]))
        served_since, now = self._served_since, self._kernel.now
        for ingress in self._plane.ingresses:
            ranks = self._reached(ingress, able) if able else set()
            for version in versions:
                if ranks and self._takes_one_of(ingress, ranks, version):
                    served_since.setdefault((ingress, version), now)
                else:
                    served_since.pop((ingress, version), None)

    def _could_serve(self, engine: SimEngine) -> bool:
        """It runs, and goes on by itself or by a coordinator."""
        server = engine.server
        if server is None or not engine.process.runs or engine.executor.hangs:
            return False
        if not self._plane.scenario.expert or server.core.wave_member.phase is Phase.ALONE:
            return True
        return self._is_led(server, engine.process.host)

    def _reached(self, ingress: SimIngress, engines: list[SimEngine]) -> set[int]:
        """Ranks of engines that an ingress reaches and knows."""
        llm, net, host = ingress.llm, self._plane.net, ingress.process.host
        if llm is None or not ingress.process.runs:
            return set()
        if net.cuts:
            engines = [each for each in engines if not net.is_blocked(host, each.process.host)]
        find = llm.view.roster.find
        known = [e for e in engines if e.server and find(e.rank, e.server.incarnation) is not None]
        return {engine.rank for engine in known}

    @staticmethod
    def _takes_one_of(ingress: SimIngress, ranks: set[int], version: str | None) -> bool:
        """Whether it sends one of these an answer of this version, or one that has not begun."""
        assert ingress.llm is not None
        router = ingress.llm._placer._router
        return not ranks.isdisjoint(router._candidates(version, 0).ranks)

    def _is_led(self, server: EngineServer, host: str) -> bool:
        """Engines that share experts need the coordinator to go on without one that was lost, until
        they go on alone. It is made again when Ray has noticed its end, and found where it has
        moved to, not while Ray's GCS is away."""
        coordinator, plane = self._plane.coordinator, self._plane
        if coordinator is None:
            return False
        process = plane.coordinators[-1][0]
        is_known = server._coordinator_client._address == coordinator.address
        if plane.ray.away and not is_known:
            return False
        return process.runs and not plane.net.is_blocked(host, process.host)

    def _look_at_requests(self, engines: list[SimEngine]) -> None:
        now, faults = self._kernel.now, self._faults
        if not (unended := [each for each in self._unended if each.request.at <= now]):
            self._served_since.clear()
            return
        self._look_at_paths(engines)
        if self._plane.operator.paused is not False:
            return
        if self._plane.scenario.expert and self._plane.net.lossy_hosts and self._plane.ray.draining:
            self._moved_at = now
        over = max(faults.begun_at, self._plane.operator.changed_at, self._moved_at)
        bound_s = _DEATH_S if self._only_engines_died else SILENCE_S + self.hang_s
        for each in unended:
            version = each.state.answer_version.required if each.state is not None else None
            if version != self._unended[each][0]:
                self._unended[each] = version, now
            ingress = self._plane.ingresses[each.request.ingress]
            since = self._served_since.get((ingress, version))
            if since is None:
                continue
            taken_s = now - max(over, since, self._unended[each][1])
            if each.end is not None:
                del self._unended[each]
            elif taken_s > bound_s / faults.slowest_clock + self._compute_s(each):
                self._break(f"r{each.number} is late")
            self.slowest_s = max(self.slowest_s, taken_s)

    def _look_at_placements(self) -> None:
        """No request stays where its ingress does not reach, if that has another engine; but for a
        heartbeat, after which it has looked: an answer that begins there has an engine since."""
        staying: dict[tuple[str, int], float] = {}
        for ingress in self._plane.ingresses:
            llm = ingress.llm
            if llm is None or not llm._placer._unreachable or not ingress.process.runs:
                continue
            unreachable, router = llm._placer._unreachable, llm._placer._router
            for state in llm._processor.request_states.values():
                version = state.answer_version.required_elsewhere
                if state.engine in unreachable and router.can_place(version):
                    key = state.request_id, state.attempt
                    since = staying[key] = self._staying.get(key, self._kernel.now)
                    if self._kernel.now - since > HEARTBEAT_S / self._faults.slowest_clock:
                        self._break(f"{state.request_id} stays at an engine that is not reached")
        self._staying = staying

    def _compute_s(self, request: SimRequest) -> float:
        steps = _COMPUTE_STEPS * request.request.max_tokens
        return _COMPUTE_S + steps * self._plane.scenario.step_s

    # ---------------------------------------------------------------- nothing is computed in vain

    def _look_at_engines(self, engines: list[SimEngine]) -> None:
        faults = self._faults
        bound_s = SILENCE_S if faults.kinds - {"drop", "loss"} else LOOK_S
        if faults.kinds and bound_s == LOOK_S:
            bound_s = _LOSS_S + ("loss" in faults.kinds) * _RETRANSMISSIONS_S
        seen, before = {}, self._unawaited
        cores = [(engine, engine.server.core) for engine in engines if engine.server is not None]
        busy = [each for each in cores if each[1].scheduler.requests]
        awaited = self._awaited() if busy else set()
        for engine, core in busy:
            steps = core.num_steps
            for request in core.scheduler.requests.values():
                attempt = (request.request_id, request.attempt)
                if attempt in awaited:
                    continue
                key = (engine.process, request.client, *attempt)
                computed_s, last = before.get(key, (0.0, steps))
                computed_s += LOOK_S if steps > last else 0.0
                seen[key] = computed_s, steps
                if computed_s > bound_s / faults.slowest_clock:
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

    def _look_at_roster(self, engines: list[SimEngine]) -> None:
        if (coordinator := self._plane.coordinator) is None:
            return
        roster = coordinator._state_machine.roster
        for engine in engines:
            member = engine.server and roster.find(engine.rank, engine.server.incarnation)
            if member and member.state is MemberState.LEAVING:
                self.leaving.setdefault(engine.process, self._kernel.now)
            elif member and engine.process in self.leaving and self._is_kept(engine.process):
                del self.leaving[engine.process]

    def _is_kept(self, process: Process) -> bool:
        """A manager says so: a coordinator that was restarted has forgotten who leaves."""
        manager = self._plane.manager
        if not (manager.has_started and manager.process.alive):
            return False
        engines = manager.manager._fleet.engines.values()
        return any(not e.leaving and process.name.startswith(f"{e.name}.") for e in engines)

    def _on_leave(self, ranks: list[int]) -> None:
        """A coordinator that ends at once has perhaps told the ingresses before."""
        for engine in self._plane.living_engines:
            if engine.rank in ranks:
                self.leaving.setdefault(engine.process, self._kernel.now)

    def _on_detach(self, ranks: list[int]) -> None:
        """An engine that leaves, and can finish what it has, has the time to. One that is not
        heard of, or to which a request is still on its way, seems to be idle."""
        self._look_at_times_to_finish(ranks)
        for engine in self._plane.living_engines:
            if engine.rank in ranks:  # a coordinator that was restarted knew it as one that stays
                self.leaving.setdefault(engine.process, self._kernel.now)

    def _look_at_times_to_finish(self, ranks: list[int]) -> None:
        net = self._plane.net
        if self._plane.operator.paused is not False or net.slow_hosts or net.lossy_hosts:
            return
        for engine in self._plane.living_engines:
            if engine.rank not in ranks or engine.server is None:
                continue
            if self._disturbances.is_disturbed(engine):
                continue
            if engine.process.host in self._plane.ray.draining:
                continue  # it has as long as its host has
            since = self.leaving.get(engine.process, self._kernel.now)
            left_s = DRAIN_TIMEOUT_S / self._faults.fastest_clock - (self._kernel.now - since)
            if engine.server.core.scheduler.requests and left_s > LOOK_S:
                self._break(f"{engine.process.name} had {left_s:.1f} s left to finish what it has")

    def _look_at_pause(self) -> None:
        """What an operator wants outlives the manager that was asked."""
        operator, manager = self._plane.operator, self._plane.manager
        leads = manager.has_started and manager.process.alive and operator.paused is not None
        if leads and manager.manager.pause_requested != operator.paused:
            self._break("the manager forgets " + ("a pause" if operator.paused else "its end"))

    def _on_end(self, process: Process) -> None:
        """A manager ends an actor. More than are wanted may be ended; which ones, while an operator
        has just asked for fewer, it decides by what it knows."""
        if self._kernel.now - self._plane.operator.shrunk_at < _SHRINK_S:
            return
        if process in self.leaving or self._is_cancelled(process):
            return
        living, is_excused = self._plane.living_engines, self._disturbances.is_excused
        staying = [each for each in living if not is_excused(each)]
        ended = [each for each in staying if each.process is process]
        manager = self._plane.manager.manager
        if ended and (ended[0].cannot_load or ended[0].version() != manager.upgrader.record.wanted):
            return
        if (
            ended
            and not self._disturbances.is_disturbed(ended[0])
            and len(staying) <= min(self._plane.operator.may_be_wanted)
        ):
            self._break(f"{process.name} was ended at {self._kernel.now:.2f} s, and was healthy")

    def _is_cancelled(self, process: Process) -> bool:
        """It loads, and fewer are wanted since: while Ray's GCS is away it cannot be ended."""
        starting = self._plane.manager.manager._fleet.starting.values()
        return any(each.leaving and process.name.startswith(f"{each.name}.") for each in starting)

    # ---------------------------------------------------------------- epochs never fall

    def _on_view(self, ingress: SimIngress, view: ClusterView) -> None:
        epoch = view.roster.epoch
        if epoch < self._epochs.get(ingress, 0):
            self._break(f"{ingress.process.name} falls back to epoch {epoch}")
        self._epochs[ingress] = epoch
