"""Laws about resources: no process keeps resources for a process or a connection that is gone, and
every request that an engine computes has a waiting client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from swell.cluster.client.engine_connection import EngineConnection, EngineId
from swell.coordinator.wave_protocol.wave_interface import Phase
from swell.engine.request import Request
from swell.engine.serving.server import EngineServer
from tests.simulator.actors import SimCoordinator, SimEngine
from tests.simulator.control_plane import (
    HEARTBEAT_S,
    STALL_TIMEOUT_S,
    ControlPlane,
    SimIngress,
)
from tests.simulator.kernel.process import Process
from tests.simulator.laws.calm import Calm, Durations
from tests.simulator.laws.observations.disturbances import LOOK_S
from tests.simulator.network.channel import SimOutlet

if TYPE_CHECKING:
    from tests.simulator.laws.observations.watch import Watch

_CLIENT_S = STALL_TIMEOUT_S + 3.0 * HEARTBEAT_S
"""The time within which an engine forgets a connection of an ingress, and drops its requests."""
_SUBSCRIBER_S = 8.0 * HEARTBEAT_S
"""The time within which a coordinator forgets a connection of an ingress: five heartbeats, and the
next publication."""
_PEER_S = STALL_TIMEOUT_S + 4.0 * HEARTBEAT_S
"""The time within which a coordinator forgets an engine that is gone and not in the roster."""
_KNOWN_S = 2 * HEARTBEAT_S + 1.0
"""The time within which an ingress has told an engine that no client waits for a request: its next
heartbeat shows lost messages, and the engine finishes a step first."""
_READY = (Phase.STOPPED, Phase.RUNNING, Phase.PAUSED, Phase.STANDALONE)
"""Phases in which an engine handles messages between its steps."""


class FreedWatch:
    """Checks these laws. `look` must be called several times per virtual second."""

    def __init__(
        self, plane: ControlPlane, watch: Watch, calm: Calm, broken: Callable[[str], None]
    ) -> None:
        self._plane, self._watch, self._calm, self._break = plane, watch, calm, broken
        self._durations = Durations(plane)
        self._steps: dict[EngineServer, int] = {}
        """The number of finished steps of each engine at the last look."""
        self._unawaited: dict[tuple[Process, bytes, str, int], tuple[float, float, int]] = {}
        """Requests that an engine has but no ingress waits for: how long it has computed since, how
        long its ingress could tell it meanwhile, and its number of steps at the last look."""

        self._opened: dict[EngineConnection, set[bytes]] = {}
        """The identities that each connection of an ingress to an engine has had."""

    def look(self) -> None:
        """A message of a process that is gone may still come while packets are late."""
        self._note_connections()
        self._look_at_requests()
        living = self._identities(self._plane.ingresses)
        ending = self._plane.manager.manager._fleet.ending.values()
        ended = {handle.ready.incarnation for handle in ending if handle.ready is not None}
        for engine in self._plane.living_engines:
            if engine.server is not None and engine.server.incarnation not in ended:
                self._look_at_clients(engine, living)
        coordinator = self._plane.coordinator
        acts = self._calm.coordinator_acts and not self._calm.packets_are_late
        if coordinator is not None and acts:
            self._look_at_subscribers(coordinator, living)
            self._look_at_peers(coordinator)
        engines = self._plane.living_engines
        self._steps = {each.server: each.executor.progress for each in engines if each.server}
        self._durations.end_look()

    @property
    def is_pending(self) -> bool:
        """Whether a process still keeps something for a connection that is gone."""
        living = self._identities(self._plane.ingresses)
        engines = [each for each in self._plane.living_engines if each.server is not None]
        if any(_clients_of(engine) - living for engine in engines):
            return True
        coordinator = self._plane.coordinator
        if coordinator is None:
            return False
        if self._gone_peers(coordinator) or self._gone_engines(coordinator):
            return True
        return not living.issuperset(coordinator._subscribers)

    def _is_over(self, key: object, bound_s: float, *, holds: bool) -> bool:
        return self._durations.held_s(key, holds=holds) > bound_s / self._watch.slowest_clock

    @staticmethod
    def _identities(owners: Sequence[SimIngress | SimEngine]) -> set[bytes]:
        """Returns the identities of all connections that living processes have opened."""
        return {
            end.identity
            for owner in owners
            if owner.process.alive
            for end in owner.process.ends
            if isinstance(end, SimOutlet) and not end.closed
        }

    def _look_at_requests(self) -> None:
        """Checks that no engine computes a request for long after its client has left. An ingress
        that runs and reaches the engine tells it soon. Otherwise the engine only notices that the
        ingress is silent."""
        seen, before, slowest = {}, self._unawaited, self._watch.slowest_clock
        engines = self._plane.living_engines
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
                computed_s, known_s, last = before.get(key, (0.0, 0.0, steps))
                if steps > last:
                    computed_s += LOOK_S
                    known_s = known_s + LOOK_S if self._may_know(request, engine) else 0.0
                seen[key] = computed_s, known_s, steps
                if known_s > _KNOWN_S / slowest or computed_s > _CLIENT_S / slowest:
                    self._break(f"{engine.process.name} computes {attempt}, which nobody awaits")
        self._unawaited = seen

    def _may_know(self, request: Request, engine: SimEngine) -> bool:
        """Returns whether the ingress of a request reaches the engine over the connection that it
        had then, or over one that has replaced it: it tells nothing to an engine that was out of
        the roster meanwhile."""
        number = int(request.request_id.removeprefix("r"))
        if number >= len(self._plane.requests):
            return False  # a probe
        ingress = self._plane.ingresses[self._plane.requests[number].request.ingress]
        if ingress.llm is None or engine.server is None:
            return False
        if engine.executor.hangs or engine.executor.worker_lost:
            return False
        client: Any = ingress.llm._client
        link = client._connections.get(EngineId(engine.rank, engine.server.incarnation))
        if request.client not in self._opened.get(link, ()):
            return False
        own = ingress.process, engine.process
        return self._calm.reach(*own) and not self._calm.were_reset(*own)

    def _note_connections(self) -> None:
        for ingress in self._plane.ingresses:
            client: Any = None if ingress.llm is None else ingress.llm._client
            for link in () if client is None else client._connections.values():
                self._opened.setdefault(link, set()).add(link._outlet.identity)

    def _awaited(self) -> set[tuple[str, int]]:
        return {
            (state.request_id, state.attempt)
            for ingress in self._plane.ingresses
            if ingress.llm is not None and ingress.process.alive
            for state in ingress.llm._processor.request_states.values()
        }

    def _look_at_clients(self, engine: SimEngine, living: set[bytes]) -> None:
        """Checks that an engine forgets the connection of an ingress that has terminated or opened
        another one, and drops its requests. Time in which the engine handles no messages does not
        count, because the engine does not count it as silence. Such an engine may wait in a step
        for other engines, which only a coordinator can start."""
        server = engine.server
        assert server is not None
        gone = _clients_of(engine) - living
        if not gone or self._plane.kernel.now < self._watch.faults_end_at:
            return  # messages that a fault has held back may still come
        handles = engine.process.runs and not engine.executor.hangs
        handles = handles and not (engine.executor.worker_lost or engine.executor.is_repairing)
        handles = handles and server.core.wave_member.phase in _READY
        handles = handles and not self._waits_in_step(engine)
        if self._plane.scenario.expert:  # its step waits for the other engines
            handles = handles and all(
                each.process.runs and not (each.executor.hangs or each.executor.worker_lost)
                for each in self._plane.living_engines
            )
            handles = handles and not self._plane.net.cuts
        for client in gone if handles else ():
            if self._is_over(("client", server, client), _CLIENT_S, holds=True):
                self._break(f"{engine.process.name} keeps something for an ingress that is gone")

    def _waits_in_step(self, engine: SimEngine) -> bool:
        """Returns whether the step of the engine has not finished since the last look."""
        assert engine.server is not None
        is_behind = self._steps.get(engine.server) == engine.executor.progress
        return is_behind and engine.server.core.wave_member.in_flight > 0

    def _look_at_subscribers(self, coordinator: SimCoordinator, living: set[bytes]) -> None:
        """Checks that a coordinator forgets the connection of an ingress that is gone, and with it
        the versions that its answers needed."""
        process = self._plane.coordinators[-1][0]
        subscribers = coordinator._subscribers
        known = {*subscribers, *subscribers._versions}
        for client in known - living if process.runs else ():
            if self._is_over(("subscriber", coordinator, client), _SUBSCRIBER_S, holds=True):
                self._break("the coordinator has a subscriber that is gone")

    def _look_at_peers(self, coordinator: SimCoordinator) -> None:
        """Checks that a coordinator forgets the connections of engines that are gone, and the
        commands for them."""
        process = self._plane.coordinators[-1][0]
        if not process.runs or self._plane.kernel.now < self._watch.faults_end_at:
            return  # messages that a fault has held back may still come
        for peer in self._gone_peers(coordinator):
            if self._is_over(("peer", coordinator, peer), _PEER_S, holds=True):
                self._break("the coordinator sends heartbeats to an engine that is gone")
        for incarnation in self._gone_engines(coordinator):
            if self._is_over(("engine", coordinator, incarnation), _PEER_S, holds=True):
                self._break("the coordinator keeps something for an engine that is gone")

    def _gone_peers(self, coordinator: SimCoordinator) -> set[bytes]:
        """Returns the connections that get heartbeats although their engines are gone."""
        return coordinator._heartbeats.keys() - self._identities(self._plane.engines)

    def _gone_engines(self, coordinator: SimCoordinator) -> set[int]:
        """Returns the incarnations that are not in the roster, and for which a coordinator keeps
        commands or a closed connection."""
        open_peers = self._identities(self._plane.engines)
        closed = {i for i, peer in coordinator._peers.items() if peer not in open_peers}
        return {*closed, *coordinator._unsent} - coordinator._state_machine.incarnations


def _clients_of(engine: SimEngine) -> set[bytes]:
    assert engine.server is not None
    return connections_of(engine.server)


def connections_of(server: EngineServer) -> set[bytes]:
    """Returns the connections for which an engine keeps anything."""
    requests = server.core.scheduler.requests.values()
    return {*server._client_tracker._clients, *(request.client for request in requests)}
