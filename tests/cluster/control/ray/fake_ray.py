"""A Ray made of a few tables, without processes. Removed names stay listed for a few listings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from swell.cluster.control.ray.actor_errors import GcsUnavailable
from swell.coordinator.transport.channel import ChannelKeys
from swell.coordinator.transport.coordinator_contact import CoordinatorEndpoint

KEYS = ChannelKeys(b"public", b"secret")


class FakeRay:
    """A fake `RayInterface`, as far as these tests need it. Actors and groups are identified by
    name. `_answer` computes the result of a call."""

    node_id = "node"

    def __init__(self) -> None:
        self.actors: dict[str, Any] = {}
        """Actor -> its answer to every call. An exception is raised."""
        self.reserved: list[str] = []
        self.kv: dict[bytes, bytes] = {}
        self.created: Any = None
        """The answer of newly created engines."""
        self.has_room = True
        self.resources: dict[str, float] = {"CPU": 1000.0}
        self.nodes: list[dict[str, float]] = []
        """The resources of each node. Empty: one node with all `resources`."""
        self.is_gcs_away = False
        self.draining: dict[str, float] = {}
        self.room_after: int | None = None
        """The number of waits for a group until there is room. None: there never is."""
        self.created_groups: list[tuple[dict[str, float], int]] = []
        """(bundle, number of bundles) of each created group."""
        self.ended: list[str] = []
        """Names of killed actors and removed groups, once per call."""
        self.killed_pids: list[tuple[int, str]] = []
        """(pid, node) of each killed process."""
        self.listings_until_gone: int | None = 2
        """The number of listings in which a removed name still appears. None: it never
        disappears."""
        self._going: dict[str, int] = {}

    def new_endpoint(self) -> CoordinatorEndpoint:
        return CoordinatorEndpoint(KEYS, "name", 1)

    async def save_hang_report(self, title: str, pid: int, node: str) -> str:
        assert (pid, node) not in self.killed_pids, "afterwards there is nothing to save"
        return f"{node}:{title} ({pid})"

    async def kill_process(self, pid: int, node: str) -> None:
        self.killed_pids.append((pid, node))

    def total_resources(self) -> dict[str, float]:
        return self.resources

    async def node_resources(self) -> list[dict[str, float]]:
        if self.is_gcs_away:
            raise GcsUnavailable("it does not answer")
        return self.nodes or [self.resources]

    async def draining_nodes(self) -> dict[str, float]:
        return self.draining

    async def free_resources(self) -> dict[str, float]:
        return self.resources

    async def create_group(self, name: str, bundle: Mapping[str, float], count: int) -> str:
        self.reserved.append(name)
        self.created_groups.append((dict(bundle), count))
        return name

    async def wait_for_group(self, group: str, timeout_s: float) -> bool:
        if self.has_room or self.room_after is None:
            return self.has_room
        await asyncio.sleep(0)
        self.room_after -= 1
        return self.room_after < 0

    async def remove_group(self, group: str) -> None:
        self._end(group)

    async def groups(self) -> dict[str, str]:
        return {name: name for name in sorted(self.reserved)}

    async def actor_names(self, namespace: str) -> list[str]:
        for name in [name for name, left in self._going.items() if left == 0]:
            del self._going[name]
            self.actors.pop(name, None)
            if name in self.reserved:
                self.reserved.remove(name)
        if self.listings_until_gone is not None:
            self._going = {name: left - 1 for name, left in self._going.items()}
        return sorted(self.actors)

    async def find_actor(self, name: str, namespace: str) -> str | None:
        return name if name in self.actors else None

    async def create_engine(self, name: str, namespace: str, group: str, **_engine: Any) -> str:
        self.actors[name] = self.created
        return name

    async def get_or_create_coordinator(self, name: str, *_args: Any, **_options: Any) -> str:
        self.actors.setdefault(name, None)
        return name

    def call(self, actor: str, method: str, *args: Any) -> Awaitable[Any]:
        return self._answer(actor, method, args)

    async def _answer(self, actor: str, method: str, args: tuple[Any, ...]) -> Any:
        says = self.actors.get(actor)
        if isinstance(says, Exception):
            raise says
        return says

    async def kill(self, actor: str, *, restart: bool = False) -> None:
        self._end(actor)

    def _end(self, name: str) -> None:
        self.ended.append(name)
        self._going.setdefault(name, self.listings_until_gone or 1)

    async def kv_get(self, key: bytes) -> bytes | None:
        await asyncio.sleep(0)
        return self.kv.get(key)

    async def kv_put(self, key: bytes, value: bytes, *, overwrite: bool = True) -> bool:
        await asyncio.sleep(0)
        if key in self.kv and not overwrite:
            return False
        self.kv[key] = value
        return True

    async def kv_keys(self, prefix: bytes) -> list[bytes]:
        await asyncio.sleep(0)
        return sorted(key for key in self.kv if key.startswith(prefix))

    async def kv_delete(self, prefix: bytes) -> None:
        for key in await self.kv_keys(prefix):
            del self.kv[key]
