"""State that must survive the loss of manager and coordinator together, stored in Ray's GCS.

A manager stores a request before it reports the request as accepted, so its successor continues
with it even if all other processes died. The keys and the port of the coordinator are stored for
the same reason: engines and ingresses know only that coordinator. `CheckpointStore.clear` deletes
everything when the application stops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from swell.cluster.control.plan.checkpoint import ClusterCheckpoint
from swell.cluster.control.ray.ray_port import RayPort
from swell.coordinator.transport.coordinator_contact import CoordinatorEndpoint

T = TypeVar("T")

_CHECKPOINT = b"note"
_DIGITS = 12


class CheckpointStore:
    """The checkpoint of one application, for one of its managers. Methods raise `GcsUnavailable`.

    Each manager that takes over writes under its own numbered key, and the key with the highest
    number counts. So a late write of an earlier manager does not replace anything.
    """

    def __init__(self, namespace: str, cluster_id: str, ray: RayPort) -> None:
        self.cluster_id = cluster_id
        self._ray = ray
        self._key = namespace.encode()
        self._checkpoint = b""
        """Name of the key under which this manager writes; empty before `take_over`."""

    async def read(self) -> ClusterCheckpoint:
        """Returns the checkpoint of the manager that took over last; an empty one if there is
        none."""
        while keys := await self._checkpoint_keys():
            raw = await self._ray.kv_get(keys[-1])
            if raw is not None:  # else a successor has just removed the key
                return msgspec.msgpack.decode(raw, type=ClusterCheckpoint)
        return ClusterCheckpoint()

    async def take_over(self, checkpoint: ClusterCheckpoint) -> ClusterCheckpoint:
        """Write the checkpoint as that of the newest manager and return it with its new term. The
        term is greater than every stored one and than that of `checkpoint`, the greatest known from
        elsewhere."""
        is_ours = False
        while not is_ours:
            earlier = await self._checkpoint_keys()
            last = _number(earlier[-1]) if earlier else 0
            term, number = checkpoint.desired.age
            taken = checkpoint.with_age(max(last, term) + 1, number)
            name = _checkpoint_name(taken.desired.term)
            raw = msgspec.msgpack.encode(taken)
            is_ours = await self._ray.kv_put(self._name(name), raw, overwrite=False)
        self._checkpoint = name
        for key in earlier:
            await self._ray.kv_delete(key)
        return taken

    async def write(self, checkpoint: ClusterCheckpoint) -> None:
        """Replace this manager's checkpoint. Requires `take_over`."""
        assert self._checkpoint, "a manager must take over first"
        await self._put(self._checkpoint, checkpoint)

    async def _checkpoint_keys(self) -> list[bytes]:
        """Returns the keys in ascending order: the last one counts."""
        return await self._ray.kv_keys(self._name(_CHECKPOINT))

    async def endpoint(self, make: Callable[[], CoordinatorEndpoint]) -> CoordinatorEndpoint:
        """Returns the endpoint of this configuration's coordinator. `make` creates it the first
        time."""
        return await self._get_or_make(
            f"endpoint-{self.cluster_id}".encode(), CoordinatorEndpoint, make
        )

    async def port(self, choose: Callable[[], int]) -> int:
        """Returns the HTTP port of this application. `choose` chooses it the first time."""
        return await self._get_or_make(b"port", int, choose)

    async def clear(self) -> None:
        """Delete everything when the application stops, including data of earlier
        configurations."""
        await self._ray.kv_delete(self._name(b""))

    async def _get_or_make(self, name: bytes, kind: type[T], make: Callable[[], T]) -> T:
        """Returns the stored value, or stores a new one. Two managers that call this at the same
        time get the same value."""
        found = await self._get(name, kind)
        if found is None:
            await self._put(name, make(), overwrite=False)
            found = await self._get(name, kind)
        assert found is not None, (
            "the value was stored just now, and is only removed with the application"
        )
        return found

    async def _get(self, name: bytes, kind: type[T]) -> T | None:
        raw = await self._ray.kv_get(self._name(name))
        return msgspec.msgpack.decode(raw, type=kind) if raw else None

    async def _put(self, name: bytes, value: object, *, overwrite: bool = True) -> None:
        raw = msgspec.msgpack.encode(value)
        await self._ray.kv_put(self._name(name), raw, overwrite=overwrite)

    def _name(self, name: bytes) -> bytes:
        return self._key + b":" + name


def _checkpoint_name(number: int) -> bytes:
    """Returns a name; names sort in the order of their numbers."""
    return b"%s-%0*d" % (_CHECKPOINT, _DIGITS, number)


def _number(key: bytes) -> int:
    """Returns the number of a key."""
    return int(key.rpartition(b"-")[2])
