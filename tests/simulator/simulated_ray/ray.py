"""A simulated Ray on the virtual clock: nodes, placement groups, named actors, keys and values.

`ray_interface.py` provides this Ray to a process. `tests/cluster/control/ray/test_ray_contract.py`
runs the same tests with it and with the real Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.simulator.kernel.kernel import WORLD, Kernel
from tests.simulator.kernel.process import Process
from tests.simulator.network.network import Network
from tests.simulator.simulated_ray.ray_actor import SimActor

_FIRST_PID = 1000
_EPSILON = 1e-6


@dataclass(frozen=True)
class RayOptions:
    """Options of the simulated Ray; times are in seconds."""

    call_s: float = 0.001
    """The average one-way delay of an actor call or a GCS request."""
    start_s: float = 0.5
    """The average time from the request for an actor to its constructor."""
    death_s: float = 0.1
    """The time until the termination of a process is noticed."""
    node_timeout_s: float = 10.0
    """The time until the loss of a host is noticed."""
    kill_s: float = 3.0
    """How long a stopped process survives after its actor was killed."""
    gcs_timeout_s: float = 10.0
    """The time after which a request to the GCS fails."""
    helper_s: float = 20.0
    """The time after which a helper task on another host counts as lost."""


@dataclass(eq=False)
class SimPlacementGroup:
    name: str
    bundle: Mapping[str, float]
    count: int
    hosts: list[str] = field(default_factory=list)
    """The hosts of its bundles; empty while it waits for resources."""
    removed: bool = False
    actors: list[SimActor] = field(default_factory=list)
    """All actors that were placed in it."""
    when_reserved: list[Callable[[], None]] = field(default_factory=list)


class SimRayCluster:
    """The state of Ray. The head, with the GCS, is the first host. `make_engine` and
    `make_coordinator` get the process, whether the actor was restarted, and the constructor's
    arguments."""

    def __init__(
        self,
        kernel: Kernel,
        net: Network,
        nodes: Mapping[str, Mapping[str, float]],
        make_engine: Callable[..., Any],
        make_coordinator: Callable[..., Any],
        options: RayOptions | None = None,
    ) -> None:
        """`nodes`: resources by host."""
        self.kernel, self.net = kernel, net
        self.options = options or RayOptions()
        self.make_engine, self.make_coordinator = make_engine, make_coordinator
        self.nodes = {host: dict(resources) for host, resources in nodes.items()}
        self.head = next(iter(nodes))
        self._all_hosts = dict.fromkeys(nodes)
        self.chance = kernel.random("ray")
        self.processes: dict[int, Process] = {}
        """All processes that were started, by pid."""
        self.actors: dict[tuple[str, str], SimActor] = {}
        """The actors that are not dead, by namespace and name."""
        self.groups: dict[str, SimPlacementGroup] = {}
        self.values: dict[bytes, bytes] = {}
        self.lost_hosts: dict[str, None] = {}
        """Hosts without power."""
        self.draining: dict[str, float] = {}
        """Hosts that will be taken away, and when; infinite if that is not known."""
        self.withdrawn: dict[str, float] = {}
        """Hosts that stay, and since when."""
        self.away = False
        """Whether the GCS is unavailable."""
        self.slow_until = 0.0
        """Until when calls of actors are delayed."""
        self._longest_delay_s = 0.0
        self.on_end: list[Callable[[Process], None]] = []
        """Called with a living process before it is killed on request."""
        self.on_put: list[Callable[[bytes, bytes], None]] = []
        """Called when the GCS has stored a value: with its key, and the value."""
        self._lives: dict[str, int] = {}
        self._delayed: list[tuple[str, Callable[[], None]]] = []
        """Requests that cannot reach the GCS, with the hosts that sent them."""
        self._isolated: dict[str, object] = {}
        """Hosts that the head cannot reach, each with a unique token."""
        net.on_change.extend((self._look_at_nodes, self._retry))

    # ---------------------------------------------------------------- processes and hosts

    def new_process(self, name: str, host: str) -> Process:
        self._lives[name] = life = self._lives.get(name, 0) + 1
        process = Process(self.kernel, f"{name}.{life}", host)
        self.processes[_FIRST_PID + len(self.processes)] = process
        return process

    def pid_of(self, process: Process) -> int:
        return next(pid for pid, each in self.processes.items() if each is process)

    def living_host(self, wanted: str) -> str:
        """Returns this host if it is a node, else the first node."""
        if wanted in self.nodes:
            return wanted
        return next(iter(self.nodes))

    def lose_host(self, host: str, processes: list[Process]) -> None:
        """Makes a host lose its power, and kills all of these processes that run there."""
        self.lost_hosts[host] = None
        self._all_hosts.setdefault(host)
        self.net.lose_host(host, self._others(host), processes)

    def restore_host(self, host: str, resources: Mapping[str, float]) -> None:
        """Adds a lost host again, without processes, as a new node. Does not add it while it is cut
        off from the head for another reason."""
        if host in self.lost_hosts:
            del self.lost_hosts[host]
            self.net.reunite(host, self._others(host))
        self.draining.pop(host, None)
        if not self.net.is_blocked(host, self.head):
            self.set_resources(host, resources)

    def set_resources(self, host: str, resources: Mapping[str, float]) -> None:
        self.nodes[host] = dict(resources)
        self._reserve()

    def _others(self, host: str) -> list[str]:
        return [other for other in self._all_hosts if other != host]

    def _look_at_nodes(self) -> None:
        """Gives up nodes that the head cannot reach for `node_timeout_s`, whether or not they are
        alive. Such a node kills its processes when it is reachable again."""
        for host in self._all_hosts:
            if not self.net.is_blocked(host, self.head):
                was_isolated = self._isolated.pop(host, None)
                if was_isolated is not None and host not in self.nodes:
                    self._end_processes(host)
            elif host not in self._isolated:
                self._isolated[host] = token = object()
                at = self.kernel.now + self.options.node_timeout_s
                self.kernel.at(at, WORLD, self._give_up_node, host, token)

    def _give_up_node(self, host: str, token: object) -> None:
        if self._isolated.get(host) is not token:
            return
        self.kernel.trace(b"ray: lost " + host.encode())
        self.nodes.pop(host, None)
        self.draining.pop(host, None)
        for actor in list(self.actors.values()):
            actor.lose_host(host)
        for group in self.groups.values():
            if host in group.hosts:
                group.hosts = []
        self._reserve()

    def _end_processes(self, host: str) -> None:
        for process in self.processes.values():
            if process.host == host:
                self.kernel.soon(WORLD, process.kill)

    def end_asked(self, process: Process | None) -> None:
        """Reports that some process has requested to kill this one."""
        if process is not None and process.alive:
            for call in self.on_end:
                call(process)

    # ---------------------------------------------------------------- the GCS

    def set_away(self, away: bool) -> None:
        self.kernel.trace(b"ray: away" if away else b"ray: back")
        self.away = away
        self._retry()

    def is_reachable(self, host: str) -> bool:
        return not self.away and not self.net.is_blocked(host, self.head)

    def when_there(self, request: Callable[[], None], host: str = "") -> None:
        """Runs a request when it can reach the GCS from a host. Requests of one host keep their
        order."""
        if any(whose == host for whose, _ in self._delayed) or not self.is_reachable(host):
            self._delayed.append((host, request))
        else:
            request()

    def _retry(self) -> None:
        delayed, self._delayed = self._delayed, []
        for host, request in delayed:
            self.when_there(request, host)

    # ---------------------------------------------------------------- actors

    def add_actor(self, actor: SimActor) -> None:
        self.actors[actor.namespace, actor.name] = actor
        self.kernel.soon(WORLD, self.when_there, actor.start)

    def release_name(self, actor: SimActor) -> None:
        key = actor.namespace, actor.name
        if self.actors.get(key) is actor:
            del self.actors[key]

    def slow_calls(self, longest_s: float, until: float) -> None:
        """Delays each call of an actor, and each answer, by up to `longest_s`."""
        self._longest_delay_s, self.slow_until = longest_s, max(until, self.slow_until)

    def way_s(self) -> float:
        """Draws the delay of a call or an answer."""
        way_s = self.options.call_s * (0.5 + self.chance.random())
        if self.kernel.now < self.slow_until:
            way_s += self._longest_delay_s * self.chance.random()
        return way_s

    # ---------------------------------------------------------------- placement groups

    def add_group(self, group: SimPlacementGroup) -> None:
        self.groups[group.name] = group
        self._reserve()

    def remove_group(self, group: SimPlacementGroup) -> None:
        """Removes a placement group and kills its actors."""
        if group.removed:
            return
        group.removed = True
        if self.groups.get(group.name) is group:
            del self.groups[group.name]
        for actor in group.actors:
            actor.forget()
            if actor.process is not None:
                self.kernel.soon(WORLD, actor.process.kill)
        self._reserve()

    def free(self, host: str) -> dict[str, float]:
        """Returns the resources of a node that no group has reserved."""
        left = dict(self.nodes[host])
        for group in self.groups.values():
            for _ in range(group.hosts.count(host)):
                for kind, amount in group.bundle.items():
                    left[kind] = left.get(kind, 0.0) - amount
        return left

    def _reserve(self) -> None:
        """Gives resources to waiting groups, in the order in which they were created."""
        for group in list(self.groups.values()):
            if not group.hosts:
                group.hosts = self._place(group)
            if group.hosts:
                calls, group.when_reserved = group.when_reserved, []
                for call in calls:
                    self.kernel.soon(WORLD, call)

    def _place(self, group: SimPlacementGroup) -> list[str]:
        """Returns the hosts of the group's bundles: one node if all fit there, else the first nodes
        with room; empty if there is not enough room."""
        room: dict[str, int] = {}
        for host in [host for host in self.nodes if host not in self.draining]:
            left = self.free(host)
            fits = (
                int((left.get(kind, 0.0) + _EPSILON) / amount)
                for kind, amount in group.bundle.items()
                if amount
            )
            room[host] = min(fits, default=group.count)
        for host, bundles in room.items():
            if bundles >= group.count:
                return [host] * group.count
        spread = [host for host, bundles in room.items() for _ in range(bundles)]
        return spread[: group.count] if len(spread) >= group.count else []
