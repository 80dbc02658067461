"""State that must survive the loss of manager and coordinator together, stored in Ray's GCS.

A manager stores a request before it reports the request as stored, so its successor continues with
it even if all other processes died. The keys and the port of the coordinator are stored for
the same reason: engines and ingresses know only that coordinator. `CheckpointStore.clear` deletes
everything when the application stops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from swell.cluster.control.plan.checkpoint import ClusterCheckpoint
from swell.cluster.control.ray.ray_interface import RayInterface
from swell.coordinator.manager_state import DesiredState
from swell.coordinator.transport.coordinator_contact import CoordinatorEndpoint

T = TypeVar("T")

_CHECKPOINT = b"note"
_DIGITS = 12


class CheckpointStore:
    """The checkpoint of one application, for one of its managers. Methods raise `GcsUnavailable`.

    Each manager that takes over writes under its own numbered key, and the key with the highest
    number counts. So a late write of an earlier manager does not replace anything. A manager first
    claims its number, then reads the state of its predecessor, and deletes that only after it has
    written its own. A predecessor that still leads after its write knows that the successor reads
    it.
    """

    def __init__(self, namespace: str, cluster_id: str, ray: RayInterface) -> None:
        self.cluster_id = cluster_id
        self._ray = ray
        self._key = namespace.encode()
        self._checkpoint = b""
        """Name of the key under which this manager writes; empty before `claim`."""
        self._earlier: list[bytes] = []
        """Keys of earlier managers, to delete once this manager has written its state."""

    async def read(self) -> ClusterCheckpoint:
        """Returns the newest stored state; an empty one if none is stored."""
        for key in reversed(await self._checkpoint_keys()):
            checkpoint = await self._read_key(key)
            if checkpoint is None:  # a successor has written its own state and removed the key
                return await self.read()
            if not checkpoint.is_claim:
                return checkpoint
        return ClusterCheckpoint()

    async def owner(self) -> str:
        """Returns the manager that took over last; empty: none has."""
        while keys := await self._checkpoint_keys():
            if (checkpoint := await self._read_key(keys[-1])) is not None:
                return checkpoint.desired.owner
        return ""

    async def claim(self, owner: str, known_term: int) -> int:
        """Takes over. Returns the term, which is greater than every stored one and than
        `known_term`, the greatest known from elsewhere. From now on `read` returns what the
        predecessor has written, and it reports no more changes as stored."""
        is_ours = False
        while not is_ours:
            self._earlier = await self._checkpoint_keys()
            last = _number(self._earlier[-1]) if self._earlier else 0
            term = max(last, known_term) + 1
            name, desired = _checkpoint_name(term), DesiredState(owner=owner, term=term)
            raw = msgspec.msgpack.encode(ClusterCheckpoint(desired, is_claim=True))
            is_ours = await self._ray.kv_put(self._name(name), raw, overwrite=False)
        self._checkpoint = name
        return term

    async def _read_key(self, key: bytes) -> ClusterCheckpoint | None:
        raw = await self._ray.kv_get(key)
        return None if raw is None else msgspec.msgpack.decode(raw, type=ClusterCheckpoint)

    async def write(self, checkpoint: ClusterCheckpoint) -> None:
        """Replaces this manager's checkpoint. Requires `claim`. The first call deletes those of
        earlier managers."""
        assert self._checkpoint, "a manager must take over first"
        await self._put(self._checkpoint, checkpoint)
        while self._earlier:
            await self._ray.kv_delete(self._earlier[-1])
            self._earlier.pop()

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
        """Deletes everything when the application stops, including data of earlier
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
