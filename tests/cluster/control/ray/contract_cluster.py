"""The interface that the Ray contract tests need of an implementation, and the namespace of one
test."""

from __future__ import annotations

from collections.abc import Coroutine
from itertools import count
from typing import Any, Protocol

from swell.cluster.control.ray.ray_interface import Actor, Group, RayInterface
from swell.configs.schema import ClusterConfig, load
from swell.coordinator.transport.channel import ChannelKeys
from swell.coordinator.transport.coordinator_contact import CoordinatorEndpoint
from tests.support.deadlines import HANG_S

CONFIG = load({"model": {"path": "m"}})
KEYS = ChannelKeys(b"public", b"secret")
VERSION = "2-0f3a91c2d4e5"
OTHER_HOST = "other_host"
"""A custom resource that only the second host has."""
_namespaces = count()


class World(Protocol):
    """One implementation of `RayInterface`, on an empty host of its own. Its actors are small, but
    have the same restart and retry options as ours:

    - `pid()` returns the process id, and `arguments()` the constructor's arguments.
    - `fail(text)` raises `LookupError(text)`.
    - `note(text, wait_s)` records a text that outlives the actor, waits, and returns the pid.
    - `ended(timeout_s)` waits, in the concurrency group of our engines' method of this name.
    """

    ray: RayInterface
    num_cpus: float
    """The CPUs of the whole cluster."""

    def run(self, scenario: Coroutine[Any, Any, None]) -> None: ...

    def notes(self) -> list[str]:
        """Returns the texts of all calls of `note` that have begun, in order."""

    def stop_process(self, pid: int) -> None:
        """Suspends the process until it is continued or killed."""

    def continue_process(self, pid: int) -> None: ...

    def process_lives(self, pid: int) -> bool: ...

    def add_host(self) -> str:
        """Adds a host, which is used only by bundles with `OTHER_HOST`. Returns its node id. May be
        called once."""

    def close(self) -> None: ...


class Cluster:
    """The namespace of one test."""

    def __init__(self, world: World) -> None:
        self.world, self.ray = world, world.ray
        self.namespace = f"swell-contract-{next(_namespaces)}"
        self._groups: list[Group] = []
        self._actors: list[Actor] = []

    async def group(self, name: str, amount: float = 0.1, kind: str = "CPU") -> Group:
        self._groups.append(await self.ray.create_group(name, {kind: amount}, 1))
        return self._groups[-1]

    async def engine(self, name: str, rank: int = 0, kind: str = "CPU") -> Actor:
        group = await self.group(f"{self.namespace}-{name}", kind=kind)
        assert await self.ray.wait_for_group(group, HANG_S)
        return await self.engine_in(group, name, rank)

    async def engine_in(self, group: Group, name: str, rank: int = 0) -> Actor:
        self._actors.append(
            await self.ray.create_engine(name, self.namespace, group, 0, CONFIG, rank, VERSION)
        )
        return self._actors[-1]

    async def coordinator(self, name: str, socket: str = "first") -> Actor:
        endpoint = CoordinatorEndpoint(KEYS, socket)
        self._actors.append(
            await self.ray.get_or_create_coordinator(
                name, self.namespace, ClusterConfig(), False, endpoint, False
            )
        )
        return self._actors[-1]

    async def names(self) -> list[str]:
        return await self.ray.actor_names(self.namespace)

    async def groups(self) -> list[str]:
        """Returns the names of the placement groups in this namespace."""
        return [name for name in await self.ray.groups() if name.startswith(self.namespace)]

    async def close(self) -> None:
        for actor in self._actors:
            await self.ray.kill(actor)
        for group in self._groups:
            await self.ray.remove_group(group)
