"""What must outlive manager and coordinator together: it is kept in Ray's GCS.

A manager writes down a request before it says that it has accepted it, so its successor goes on
with that whatever else has died. The coordinator's keys and port are here for the same
reason: engines and ingresses know no other. `close` of the application forgets all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from swell.cluster.control.ray_port import RayPort
from swell.coordinator.service import CoordinatorEndpoint

T = TypeVar("T")


class ClusterCheckpoint(msgspec.Struct, frozen=True):
    """What a manager wants, for its successor. Append-only: another version may read it."""

    owner: str = ""
    """The manager that took over last: it leads."""
    identity: str = ""
    """Of the configuration that it manages; the rest is void for another one."""
    target: int = 0
    """Engines wanted; 0: unknown."""
    pause_requested: bool = False
    """An operator wants a pause."""
    served: bool = False
    """The cluster was up once."""
    data: int = 0
    """`parallel.data` of the configuration; 0: unknown."""


class CheckpointStore:
    """The checkpoint of one application. Raises what Ray raises while its GCS is away."""

    def __init__(self, namespace: str, identity: str, ray: RayPort) -> None:
        self.identity = identity
        self._ray = ray
        self._key = namespace.encode()

    async def read(self) -> ClusterCheckpoint:
        return await self._get(b"note", ClusterCheckpoint) or ClusterCheckpoint()

    async def write(self, checkpoint: ClusterCheckpoint) -> None:
        await self._put(b"note", checkpoint)

    async def endpoint(self, make: Callable[[], CoordinatorEndpoint]) -> CoordinatorEndpoint:
        """Where the coordinator of this configuration is found; made once."""
        return await self._get_or_make(
            f"endpoint-{self.identity}".encode(), CoordinatorEndpoint, make
        )

    async def port(self, choose: Callable[[], int]) -> int:
        """The HTTP port that was chosen for this application; chosen once."""
        return await self._get_or_make(b"port", int, choose)

    async def clear(self) -> None:
        """The application ends: nothing of it is left, nor of earlier configurations."""
        await self._ray.kv_delete(self._name(b""))

    async def _get_or_make(self, name: bytes, kind: type[T], make: Callable[[], T]) -> T:
        """Two managers that come at once agree on the first one's."""
        found = await self._get(name, kind)
        if found is None:
            await self._put(name, make(), overwrite=False)
            found = await self._get(name, kind)
        assert found is not None, "it was put a moment ago, and is removed with the application"
        return found

    async def _get(self, name: bytes, kind: type[T]) -> T | None:
        raw = await self._ray.kv_get(self._name(name))
        return msgspec.msgpack.decode(raw, type=kind) if raw else None

    async def _put(self, name: bytes, value: object, *, overwrite: bool = True) -> None:
        raw = msgspec.msgpack.encode(value)
        await self._ray.kv_put(self._name(name), raw, overwrite=overwrite)

    def _name(self, name: bytes) -> bytes:
        return self._key + b":" + name
