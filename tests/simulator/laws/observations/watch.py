"""Laws that must hold at all times, checked several times per virtual second.

A bound starts at the latest of these: the start of the last fault, the last reply to an operator,
and the moment since when an ingress reaches an engine that could serve. A process clock at half the
world's rate doubles the bounds.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import permutations

from swell.cluster.client.engine_connection import EngineId
from swell.coordinator.roster import MemberState
from swell.coordinator.wave_protocol.wave_interface import Phase
from swell.coordinator.wire import ClusterView
from swell.engine.serving.server import EngineServer
from tests.simulator.actors import SimEngine
from tests.simulator.control_plane import (
    DRAIN_TIMEOUT_S,
    HEARTBEAT_S,
    STALL_TIMEOUT_S,
    ControlPlane,
    SimIngress,
    SimRequest,
)
from tests.simulator.faults import FaultInjector
from tests.simulator.kernel.process import Process
from tests.simulator.laws.calm import Calm, Durations
from tests.simulator.laws.decisions import DecisionWatch
from tests.simulator.laws.freed import FreedWatch
from tests.simulator.laws.growth import GrowthWatch
from tests.simulator.laws.knowledge import KnowledgeWatch
from tests.simulator.laws.leaving import LeavingWatch
from tests.simulator.laws.membership import MembershipWatch
from tests.simulator.laws.observations.disturbances import LOOK_S, Disturbances
from tests.simulator.laws.pausing import PausingWatch
from tests.simulator.laws.refusals import RefusalWatch
from tests.simulator.laws.stored import StoredWatch

SILENCE_S = STALL_TIMEOUT_S + 3 * HEARTBEAT_S
"""The time until requests that were lost with a host, or with a path to it, continue elsewhere."""
_NOTICE_S = 3.0
"""The manager knows within this time that a host stays."""
_DEATH_S = 3.0
"""The time until requests that were lost with only an engine continue elsewhere."""
STUCK_S = 2 * STALL_TIMEOUT_S + 3 * HEARTBEAT_S
"""Additional time for each engine that hangs: it sends heartbeats but does not compute, so it is
detected after twice the stall timeout with work (`engine_monitor.py`). A request may move from one
hanging engine to the next."""
_COMPUTE_S, _COMPUTE_STEPS = 1.5, 1.5
"""The bound of a request's computing time: seconds, and steps for each of its tokens."""
_SPLIT_S = 3 * STALL_TIMEOUT_S + 3 * HEARTBEAT_S
"""The time within which a group whose engines do not all reach each other, or do not all hear the
coordinator, continues without one of them: its steps stop, as if an engine hung, or it does not
form (`forming_monitor.py`)."""
_SHRINK_S = 20.0
"""The time within which engines above the target number have left."""


class Watch:
    """Collects the broken laws, each of them once."""

    def __init__(self, plane: ControlPlane, faults: FaultInjector) -> None:
        self._plane, self._faults, self._kernel = plane, faults, plane.kernel
        self.broken: dict[str, None] = {}
        self.slowest_s = 0.0
        """The longest time that a request took after its bound started."""
        self._served_since: dict[tuple[SimIngress, str | None], float] = {}
        """Since when each ingress reaches an engine that serves each version, or any version
        (None)."""
        self._unended: dict[SimRequest, tuple[str | None, float]] = {
            each: (None, each.request.at) for each in plane.requests
        }
        """For each unfinished request: the version that its answer needs (None: any, before its
        first attempt), and since when."""
        self._queued_s: defaultdict[str, float] = defaultdict(float)
        """For how long each request has waited in an engine while others had the engine's rows or
        blocks."""
        self._calm = Calm(plane, faults)
        self._disturbances = Disturbances(plane, faults, self._calm)
        self.leaving: dict[Process, float] = {}
        """Engines that must leave, as the coordinator last knew, and since when."""
        self._hurried: set[Process] = set()
        """Engines that leave because their host has a notice. They have only the time of the
        notice, even if it is withdrawn later."""
        self._staying: dict[tuple[str, int], float] = {}
        """Requests, with the number of the attempt, that stay at an unreachable engine although
        another engine could take them, and since when."""
        self._moved_at = 0.0
        """The last time at which engines that share experts were leaving a draining host while
        packets were lost: each change of the groups then waits for retransmissions."""
        self._split_at = 0.0
        """The last time at which a group could not step or form because of a cut. Counts for at
        most `_SPLIT_S` of each group after each cut."""
        self._durations = Durations(plane)
        self._epochs: dict[SimIngress, int] = {}
        self._ended: set[Process] = set()
        """Processes that a manager has ended."""
        plane.ray.on_end.extend((self._ended.add, self._on_end))
        plane.on_view.append(self._on_view)
        plane.on_leave.append(self._on_leave)
        plane.on_detach.append(self._on_detach)
        self._membership = MembershipWatch(plane, self, self._calm, self._break)
        self._knowledge = KnowledgeWatch(plane, self, self._calm, self._break)
        self._decisions = DecisionWatch(plane, self, self._calm, self._break)
        self._leaving = LeavingWatch(plane, self, self._calm, self._break)
        self._pausing = PausingWatch(plane, self, self._calm, self._break)
        self._refusals = RefusalWatch(plane, self._break)
        self._growth = GrowthWatch(plane, self._break)
        self._stored = StoredWatch(plane, self._break)
        self.freed = FreedWatch(plane, self, self._calm, self._break)

    def look(self) -> None:
        self._calm.look()
        engines = self._plane.living_engines
        self._look_at_group(engines)
        self._look_at_requests(engines)
        self._disturbances.look(engines)
        self._look_at_roster(engines)
        self._look_at_pause()
        self._look_at_placements()
        self._membership.look()
        self._knowledge.look()
        self._decisions.look()
        self._leaving.look()
        self._pausing.look()
        self.freed.look()
        self._durations.end_look()

    @property
    def slowest_clock(self) -> float:
        return self._faults.slowest_clock

    @property
    def fastest_clock(self) -> float:
        return self._faults.fastest_clock

    @property
    def faults_begun_at(self) -> float:
        """When the latest fault began."""
        return self._faults.begun_at

    @property
    def faults_end_at(self) -> float:
        """When the last fault so far has ended, or will end."""
        return self._faults.last_at

    def may_lose(self, engine: SimEngine) -> bool:
        """Returns whether the engine is or was disturbed, so that it may count as lost."""
        return self._disturbances.is_disturbed(engine) or self.is_excused(engine)

    def is_excused(self, engine: SimEngine) -> bool:
        """Returns whether the engine hangs or was recently disturbed for long."""
        return self._disturbances.is_excused(engine)

    def may_be_unheard(self, engine: SimEngine) -> bool:
        """Returns whether the newest coordinator may not have heard the engine yet."""
        return self._disturbances.follows_an_earlier_coordinator(engine)

    def was_lost(self, engine: SimEngine) -> bool:
        """Returns whether the engine was ever disturbed, or ended without a request."""
        is_dead = not engine.process.alive and engine.process not in self._ended
        return is_dead or self._disturbances.was_ever_disturbed(engine)

    @property
    def _only_engines_died(self) -> bool:
        """Whether only engines were killed: Ray tells the manager, which tells the coordinator,
        which tells the ingresses."""
        were_killed = {line.split()[2] for line in self._faults.happened}
        return self._faults.kinds <= {"kill", "poison"} and all(
            name.startswith("sim-engine") for name in were_killed
        )

    @property
    def hang_s(self) -> float:
        """How long hanging engines may hold up the others. If a group does not form, it is formed
        once more before the hanging engine is identified. A newcomer that is stopped may be found
        silent only after it was to join the group."""
        if not self._plane.scenario.expert:
            return self._faults.num_hangs * STUCK_S
        return 2 * self._faults.num_hangs * STUCK_S + (
            self._faults.num_stopped_newcomers * SILENCE_S
        )

    def _break(self, law: str) -> None:
        self.broken.setdefault(law)

    # ---------------------------------------------------------------- each request ends in time

    def _look_at_paths(self, engines: list[SimEngine]) -> None:
        """Records which ingress reaches an engine for which version. Each path is checked once,
        although it may serve several versions."""
        able = [engine for engine in engines if self._could_serve(engine)]
        versions = (
            None,
            *dict.fromkeys([engine.current_version for engine in self._plane.engines]),
        )
        served_since, now = self._served_since, self._kernel.now
        for ingress in self._plane.ingresses:
            ranks = self._reached(ingress, able) if able else set()
            for version in versions:
                if ranks and self._takes_one_of(ingress, ranks, version):
                    served_since.setdefault((ingress, version), now)
                else:
                    served_since.pop((ingress, version), None)

    def _could_serve(self, engine: SimEngine) -> bool:
        """Returns whether the engine runs and can compute, by itself or led by a coordinator. One
        that an earlier coordinator has paused does not hear of a resume, which only the newest one
        gets, until it follows this one."""
        server = engine.server
        if server is None or not engine.process.runs or engine.executor.hangs:
            return False
        if not self._plane.scenario.expert or server.core.wave_member.phase is Phase.STANDALONE:
            return True
        is_paused = server.core.wave_member.phase is Phase.PAUSED
        return self._is_led(server, engine.process.host) and not (
            is_paused and self.may_be_unheard(engine)
        )

    def _reached(self, ingress: SimIngress, engines: list[SimEngine]) -> set[int]:
        """Returns the ranks of engines that an ingress reaches and knows."""
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
        """Returns whether the ingress would send a request to one of these ranks: one whose answer
        needs `version`, or one that has not begun (None)."""
        assert ingress.llm is not None
        router = ingress.llm._placer._router
        return not ranks.isdisjoint(router._candidates(version, 0).ranks)

    def _is_led(self, server: EngineServer, host: str) -> bool:
        """Returns whether the engine can follow the newest coordinator. Engines that share experts
        need it to continue without a lost engine, until they serve standalone. Ray restarts a
        coordinator after it has noticed its termination; engines find its new address in Ray,
        unless the GCS is unavailable."""
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
        over = max(faults.begun_at, self._plane.operator.changed_at, self._moved_at, self._split_at)
        bound_s = _DEATH_S if self._only_engines_died else SILENCE_S + self.hang_s
        self._note_queued(engines)
        for each in unended:
            version = self._needed_version(each, engines)
            if version != self._unended[each][0]:
                self._unended[each] = version, now
            ingress = self._plane.ingresses[each.request.ingress]
            since = self._served_since.get((ingress, version))
            if since is None:
                continue
            taken_s = now - max(over, since, self._unended[each][1])
            taken_s -= self._queued_s[f"r{each.number}"]
            if each.end is not None:
                del self._unended[each]
            elif taken_s > bound_s / faults.slowest_clock + self._compute_s(each):
                self._break(f"r{each.number} is late")
            self.slowest_s = max(self.slowest_s, taken_s)

    def _note_queued(self, engines: list[SimEngine]) -> None:
        """Records the requests that wait for the rows or blocks of others."""
        for engine in engines:
            scheduler = None if engine.server is None else engine.server.core.scheduler
            if scheduler is not None and scheduler.num_waiting and scheduler.running:
                running = {request.request_id for request in scheduler.running}
                for request_id in scheduler.requests.keys() - running:
                    self._queued_s[request_id] += LOOK_S

    def _needed_version(self, request: SimRequest, engines: list[SimEngine]) -> str | None:
        """Returns the version of the engine that the request needs now; None: any version. A
        request without tokens that its engine cannot serve may continue on any active engine, but
        on no leaving one, like a new request. So it waits if all other engines are leaving."""
        if (state := request.state) is None:
            return None
        ingress = self._plane.ingresses[request.request.ingress]
        own = [e for e in engines if e.server and state.engine == (e.rank, e.server.incarnation)]
        is_served = any(map(self._could_serve, own)) and bool(self._reached(ingress, own))
        if ingress.llm is None or state.engine in ingress.llm._placer._unreachable:
            is_served = False
        version = state.answer_version
        return version.required if is_served else version.required_elsewhere

    def _look_at_group(self, engines: list[SimEngine]) -> None:
        """Records a group whose engines do not all reach each other, or do not hear the
        coordinator, which hears them: its steps do not begin or finish, or the next group does not
        form. Its time starts again at each new cut: engines may have joined before it."""
        coordinator, net = self._plane.coordinator, self._plane.net
        if coordinator is None or not net.cuts:
            return
        group = [engine for engine in engines if engine.rank in coordinator.group_ranks]
        hosts = {engine.process.host for engine in group}
        own = self._plane.coordinators[-1][0].host
        paths = [*permutations(hosts, 2)]
        paths += [(own, host) for host in hosts if not net.is_cut(host, own)]
        if cut_at := [net.cuts[path] for path in paths if path in net.cuts]:
            key = "split", coordinator, max(cut_at), *(engine.process for engine in group)
            if self._durations.held_s(key) <= _SPLIT_S / self._faults.slowest_clock:
                self._split_at = self._kernel.now

    def _look_at_placements(self) -> None:
        """Checks that no request stays at an engine that its ingress cannot reach, or that replaces
        a worker, if another engine could take it. It may stay for a heartbeat after both became
        true, because the ingress polls."""
        staying: dict[tuple[str, int], float] = {}
        for ingress in self._plane.ingresses:
            llm = ingress.llm
            if llm is None or not ingress.process.runs:
                continue
            placer, router = llm._placer, llm._placer._router
            unable = {m for m in placer._roster.members if m.state is MemberState.REPAIRING}
            unreachable = placer._unreachable | {EngineId.of(member) for member in unable}
            if not unreachable:
                continue
            for state in llm._processor.request_states.values():
                version = state.answer_version.required_elsewhere
                if state.engine in unreachable and router.can_place(version):
                    key = state.request_id, state.attempt
                    since = staying[key] = self._staying.get(key, self._kernel.now)
                    if self._kernel.now - since > HEARTBEAT_S / self._faults.slowest_clock:
                        self._break(f"{state.request_id} stays at an engine that cannot serve it")
        self._staying = staying

    def _compute_s(self, request: SimRequest) -> float:
        steps = _COMPUTE_STEPS * request.request.max_tokens
        return _COMPUTE_S + steps * self._plane.scenario.step_s

    # ---------------------------------------------------------------- no healthy engine is killed

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
                self._hurried.discard(engine.process)

    def _is_kept(self, process: Process) -> bool:
        """Returns whether the manager keeps the engine: a restarted coordinator has forgotten which
        engines leave."""
        manager = self._plane.manager
        if not (manager.has_started and manager.process.alive):
            return False
        engines = manager.manager._fleet.engines.values()
        return any(not e.leaving and process.name.startswith(f"{e.name}.") for e in engines)

    def _on_leave(self, ranks: list[int]) -> None:
        """Records engines that leave: a coordinator that terminates right afterwards may already
        have told the ingresses."""
        for engine in self._plane.living_engines:
            if engine.rank in ranks:
                self.leaving.setdefault(engine.process, self._kernel.now)
                if self._may_know_a_notice(engine.process.host):
                    self._hurried.add(engine.process)

    def _may_know_a_notice(self, host: str) -> bool:
        """Whether the manager may count a host as going away: a notice that was withdrawn counts
        until it asks again."""
        ray = self._plane.ray
        since = ray.withdrawn.get(host)
        if since is None:
            return host in ray.draining
        is_known = self._kernel.now > since + _NOTICE_S and not self._calm.calls_are_late
        return host in ray.draining or not is_known

    def _on_detach(self, ranks: list[int]) -> None:
        """Checks that a leaving engine has had enough time to finish its requests, unless it was
        disturbed. An engine that is not heard, or to which a request is in flight, looks idle."""
        self._look_at_times_to_finish(ranks)
        for engine in self._plane.living_engines:
            if engine.rank in ranks:  # a restarted coordinator listed it as active
                self.leaving.setdefault(engine.process, self._kernel.now)

    def _look_at_times_to_finish(self, ranks: list[int]) -> None:
        if self._plane.operator.paused is not False:
            return
        ingresses = [ingress.process for ingress in self._plane.ingresses]
        coordinator, _ = self._plane.coordinators[-1]
        if any(self._calm.is_late(each, coordinator) for each in ingresses):
            return  # an ingress that does not know that the engine leaves still sends requests
        for engine in self._plane.living_engines:
            if engine.rank not in ranks or engine.server is None:
                continue
            if self._disturbances.is_disturbed(engine):
                continue
            if any(self._calm.is_late(each, engine.process) for each in ingresses):
                continue  # a request that is in flight for long may arrive now
            if engine.process in self._hurried or engine.process.host in self._plane.ray.draining:
                continue  # it has only the time that its host has
            since = self.leaving.get(engine.process, self._kernel.now)
            left_s = DRAIN_TIMEOUT_S / self._faults.fastest_clock - (self._kernel.now - since)
            if engine.server.core.scheduler.requests and left_s > LOOK_S:
                self._break(f"{engine.process.name} had {left_s:.1f} s left to finish what it has")

    def _look_at_pause(self) -> None:
        """Checks that a pause or resume that an operator requested outlives the manager that got
        the request."""
        operator, manager = self._plane.operator, self._plane.manager
        leads = manager.has_started and manager.process.alive and operator.paused is not None
        if leads and manager.manager.pause_requested != operator.paused:
            self._break("the manager forgets " + ("a pause" if operator.paused else "its end"))

    def _on_end(self, process: Process) -> None:
        """Checks that a manager does not kill a healthy engine that is needed. It may kill engines
        above the target number; while an operator has just reduced the number, it chooses them by
        what it knows. It ends those that Ray creates late for an earlier manager."""
        stopped = [e.stopped_at for e in self._plane.engines if e.process is process]
        for at in (self._kernel.now, *stopped):  # what is stopped is ended by any later manager
            if at is not None and 0.0 <= at - self._plane.operator.shrunk_at < _SHRINK_S:
                return
        if process in self.leaving or self._is_cancelled(process):
            return
        if process in self._decisions.orphans:
            return
        living, is_excused = self._plane.living_engines, self._disturbances.is_excused
        staying = [each for each in living if not is_excused(each)]
        ended = [each for each in staying if each.process is process]
        manager = self._plane.manager.manager
        if ended and (
            ended[0].cannot_load or ended[0].current_version != manager.upgrader.record.wanted
        ):
            return
        if (
            ended
            and not self._disturbances.is_disturbed(ended[0])
            and len(staying) <= min(self._plane.operator.possible_targets)
        ):
            self._break(f"{process.name} was ended at {self._kernel.now:.2f} s, and was healthy")

    def _is_cancelled(self, process: Process) -> bool:
        """Returns whether the engine still loads although the target has fallen: it cannot be
        killed while Ray's GCS is unavailable."""
        starting = self._plane.manager.manager._fleet.starting.values()
        return any(each.leaving and process.name.startswith(f"{each.name}.") for each in starting)

    # ---------------------------------------------------------------- epochs never decrease

    def _on_view(self, ingress: SimIngress, view: ClusterView) -> None:
        epoch = view.roster.epoch
        if epoch < self._epochs.get(ingress, 0):
            self._break(f"{ingress.process.name} falls back to epoch {epoch}")
        self._epochs[ingress] = epoch
