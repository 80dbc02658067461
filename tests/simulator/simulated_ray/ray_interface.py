"""Simulates `swell.cluster.control.ray.ray_interface.RayInterface` for one process.

Coroutines wait for the GCS, and fail after some seconds. The GCS may still execute a failed request
later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from swell.cluster.control.ray.actor_errors import ActorUnavailable, GcsUnavailable
from swell.configs.schema import ClusterConfig, Config
from swell.coordinator.transport.channel import ChannelKeys
from swell.coordinator.transport.coordinator_contact import CoordinatorEndpoint
from tests.simulator.kernel.process import Process
from tests.simulator.simulated_ray.ray import SimPlacementGroup, SimRayCluster
from tests.simulator.simulated_ray.ray_actor import Concurrency, SimActor

T = TypeVar("T")

ENGINE_CALLS = Concurrency(
    4, {"loading": 4, "watching": 4}, {"start": "loading", "ended": "watching"}
)
"""The options of `EngineActor`."""
COORDINATOR_CALLS = Concurrency(
    16, {"discovery": 4}, {"probe": "discovery", "contact": "discovery"}
)
"""The options of `Coordinator`."""
_KEY_BYTES = 8


class SimRay:
    """The connection of a process to the simulated Ray."""

    def __init__(self, cluster: SimRayCluster, process: Process) -> None:
        self._cluster, self._process = cluster, process
        self._arrives_at = 0.0
        """When its latest request reaches the GCS: requests do not overtake each other."""

    # ---------------------------------------------------------------- this host

    @property
    def node_id(self) -> str:
        return self._process.host

    def new_endpoint(self) -> CoordinatorEndpoint:
        bits = self._process.bits
        public, secret, name = (bits.randbytes(_KEY_BYTES) for _ in range(3))
        host = self._process.host
        port = self._cluster.net.free_port(host)
        return CoordinatorEndpoint(ChannelKeys(public, secret), name.hex(), port, host)

    async def save_hang_report(self, title: str, pid: int, node: str) -> str:
        return ""

    async def kill_process(self, pid: int, node: str) -> None:
        process, cluster = self._cluster.processes.get(pid), self._cluster
        if process is not None and process.host == node:
            cluster.end_asked(process)
        if node != self._process.host:
            if not await self._request(lambda: node in cluster.nodes):
                raise ActorUnavailable(f"there is no node {node}")
            if cluster.net.is_blocked(node, self._process.host):
                await asyncio.sleep(cluster.options.helper_s)
                raise ActorUnavailable(f"no helper came up on {node}")
            await asyncio.sleep(cluster.options.start_s * cluster.chance.random())
        if process is not None and process.host == node:
            process.kill()

    # ---------------------------------------------------------------- resources

    def total_resources(self) -> dict[str, float]:
        return _sum(list(self._cluster.nodes.values()))

    async def node_resources(self) -> list[dict[str, float]]:
        nodes = self._cluster.nodes
        return await self._request(lambda: [dict(resources) for resources in nodes.values()])

    async def draining_nodes(self) -> dict[str, float]:
        cluster, kernel = self._cluster, self._process.kernel
        return await self._request(
            lambda: {
                host: max(0.0, at - kernel.now)
                for host, at in cluster.draining.items()
                if host in cluster.nodes
            }
        )

    async def free_resources(self) -> dict[str, float]:
        cluster = self._cluster
        return await self._request(lambda: _sum([cluster.free(host) for host in cluster.nodes]))

    # ---------------------------------------------------------------- placement groups

    async def create_group(
        self, name: str, bundle: Mapping[str, float], count: int
    ) -> SimPlacementGroup:
        if name in self._cluster.groups:
            raise RuntimeError(f"a placement group of the name {name} is there already")
        group = SimPlacementGroup(name, dict(bundle), count)
        await self._request(lambda: self._cluster.add_group(group))
        return group

    async def wait_for_group(self, group: SimPlacementGroup, timeout_s: float) -> bool:
        reserved = asyncio.Event()
        if group.hosts:
            return True
        group.when_reserved.append(lambda: self._soon(reserved.set))
        try:
            async with asyncio.timeout(timeout_s):
                await reserved.wait()
        except TimeoutError:
            return False
        return True

    async def remove_group(self, group: SimPlacementGroup) -> None:
        for actor in group.actors:
            self._cluster.end_asked(actor.process)
        await self._request(lambda: self._cluster.remove_group(group))

    async def groups(self) -> dict[str, SimPlacementGroup]:
        groups = self._cluster.groups
        return await self._request(lambda: {name: groups[name] for name in sorted(groups)})

    # ---------------------------------------------------------------- actors

    async def actor_names(self, namespace: str) -> list[str]:
        actors = self._cluster.actors
        return await self._request(
            lambda: sorted(name for whose, name in actors if whose == namespace)
        )

    async def find_actor(self, name: str, namespace: str) -> SimActor | None:
        return await self._request(lambda: self._cluster.actors.get((namespace, name)))

    async def create_engine(
        self,
        name: str,
        namespace: str,
        group: SimPlacementGroup,
        num_gpus: float,
        config: Config,
        rank: int,
        version: str,
    ) -> SimActor:
        if (namespace, name) in self._cluster.actors:
            raise ValueError(f"an actor of the name {name} is there already")

        def make(process: Process, again: bool) -> Any:
            return self._cluster.make_engine(process, again, config, rank, version)

        return await self._create(name, namespace, make, concurrency=ENGINE_CALLS, group=group)

    async def get_or_create_coordinator(
        self,
        name: str,
        namespace: str,
        config: ClusterConfig,
        lockstep: bool,
        endpoint: CoordinatorEndpoint,
        inherited: bool,
    ) -> SimActor:
        def make(process: Process, again: bool) -> Any:
            arguments = config, lockstep, endpoint, inherited
            return self._cluster.make_coordinator(process, again, *arguments)

        return await self._create(
            name, namespace, make, concurrency=COORDINATOR_CALLS, restarts=True
        )

    async def _create(
        self,
        name: str,
        namespace: str,
        make: Callable[[Process, bool], Any],
        *,
        concurrency: Concurrency,
        group: SimPlacementGroup | None = None,
        restarts: bool = False,
    ) -> SimActor:
        """Creates an actor, or returns the actor that has this name by now."""
        cluster = self._cluster

        def add() -> SimActor:
            found = cluster.actors.get((namespace, name))
            if found is not None:
                return found
            actor = SimActor(
                cluster,
                name,
                namespace,
                make,
                host=self._process.host,
                concurrency=concurrency,
                group=group,
                restarts=restarts,
            )
            cluster.add_actor(actor)
            return actor

        return await self._request(add)

    def call(self, actor: SimActor, method: str, *args: Any) -> Awaitable[Any]:
        return actor.call(self._process, method, args)

    async def kill(self, actor: SimActor, *, restart: bool = False) -> None:
        self._cluster.end_asked(actor.process)
        await self._request(lambda: actor.kill(restart))

    # ---------------------------------------------------------------- keys and values

    async def kv_get(self, key: bytes) -> bytes | None:
        return await self._request(lambda: self._cluster.values.get(key), "kv_get")

    async def kv_put(self, key: bytes, value: bytes, *, overwrite: bool = True) -> bool:
        values = self._cluster.values

        def put() -> bool:
            if key in values and not overwrite:
                return False
            values[key] = value
            for call in self._cluster.on_put:
                call(key, value)
            return True

        return await self._request(put, "kv_put")

    async def kv_keys(self, prefix: bytes) -> list[bytes]:
        return await self._request(
            lambda: sorted(key for key in self._cluster.values if key.startswith(prefix)),
            "kv_keys",
        )

    async def kv_delete(self, prefix: bytes) -> None:
        values = self._cluster.values

        def delete() -> None:
            for key in [key for key in values if key.startswith(prefix)]:
                del values[key]

        await self._request(delete)

    # ---------------------------------------------------------------- the GCS

    def _soon(self, call: Callable[[], Any]) -> None:
        """Schedules a call in this process."""
        self._process.kernel.soon(self._process, call)

    async def _request(self, request: Callable[[], T], name: str = "") -> T:
        """Returns the result of a GCS request. The request may be executed even if it has timed out
        here. Faults may wait for a request with this `name`."""
        cluster, kernel = self._cluster, self._process.kernel
        answer: asyncio.Future[T] = self._process.loop.create_future()

        def done() -> None:
            result = request()
            self._soon(partial(_set, answer, result))

        way_s = cluster.options.call_s * (0.5 + cluster.chance.random())
        self._arrives_at = max(self._arrives_at, kernel.now + way_s)
        host = self._process.host
        kernel.at(self._arrives_at, self._process, cluster.when_there, done, host)
        cluster.net.on_sent(name, None, self._arrives_at)
        try:
            async with asyncio.timeout(cluster.options.gcs_timeout_s):
                return await answer
        except TimeoutError:
            raise GcsUnavailable("the GCS does not answer") from None


def _set(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _sum(parts: list[dict[str, float]]) -> dict[str, float]:
    """Returns the sum of resources by kind, without kinds whose amount is 0."""
    total: dict[str, float] = {}
    for part in parts:
        for kind, amount in part.items():
            total[kind] = total.get(kind, 0.0) + amount
    return {kind: amount for kind, amount in total.items() if amount > 1e-6}
