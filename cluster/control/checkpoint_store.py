"""What must outlive manager and coordinator together: it is kept in Ray's GCS.

A manager writes down a request before it says that it has accepted it, so its successor goes on
with that whatever else has died. The coordinator's keys and port are here for the same
reason: engines and ingresses know no other. `close` of the application forgets all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from swell.cluster.control.drain_record import DrainRecord
from swell.cluster.control.ray_port import RayPort
from swell.cluster.control.versions import UpgradeRecord
from swell.configs.lora import Adapter
from swell.coordinator.contact import CoordinatorEndpoint
from swell.coordinator.manager_state import ManagerState, Sleep
from swell.coordinator.scaling_counts import ScalingCounts

T = TypeVar("T")

_CHECKPOINT = b"note"
_DIGITS = 12


class ClusterCheckpoint(msgspec.Struct, frozen=True):
    """What a manager wants, for its successor. Append-only: another version may read it."""

    owner: str = ""
    """The manager that took over last: it leads."""
    identity: str = ""
    """Of what no upgrade changes of its configuration; the rest is void for another one."""
    target: int = 0
    """Engines wanted; 0: unknown."""
    pause_requested: bool = False
    """An operator wants a pause."""
    served: bool = False
    """The cluster was up once."""
    data: int = 0
    """`parallel.data` of the configuration; 0: unknown."""
    term: int = 0
    """Grows with each manager that takes over."""
    number: int = 0
    """Grows with each change of what is wanted."""
    upgrade: UpgradeRecord = UpgradeRecord()
    """The versions of the engines."""
    drains: tuple[DrainRecord, ...] = ()
    """Engines that leave."""
    adapters: tuple[Adapter, ...] = ()
    """Those that came while the server ran."""
    sleep: Sleep = Sleep()
    """As deep as an operator wants paused engines to sleep."""

    @property
    def age(self) -> tuple[int, int]:
        """To be compared with that of a `ManagerState`: the greater one is newer."""
        return self.term, self.number

    def manager_state(self, phase: str, scaling: ScalingCounts) -> ManagerState:
        """What coordinator and engines keep of it."""
        return ManagerState(
            self.owner,
            phase,
            self.target,
            self.pause_requested,
            self.served,
            self.data,
            self.term,
            self.number,
            scaling,
            self.adapters,
            self.sleep,
        )


class CheckpointStore:
    """The checkpoint of one application, for one of its managers. Raises `GcsUnavailable`.

    Each manager that takes over writes under a key of its own, and the key with the highest number
    counts. So a write of an earlier manager that arrives late replaces nothing.
    """

    def __init__(self, namespace: str, identity: str, ray: RayPort) -> None:
        self.identity = identity
        self._ray = ray
        self._key = namespace.encode()
        self._checkpoint = b""
        """The name under which this manager writes; empty before it takes over."""

    async def read(self) -> ClusterCheckpoint:
        """Of the manager that took over last."""
        while keys := await self._checkpoint_keys():
            raw = await self._ray.kv_get(keys[-1])
            if raw is not None:  # else a successor has just removed it
                return msgspec.msgpack.decode(raw, type=ClusterCheckpoint)
        return ClusterCheckpoint()

    async def take_over(self, checkpoint: ClusterCheckpoint) -> ClusterCheckpoint:
        """Write it as the newest manager's, with a term of its own, which it returns. It is greater
        than that of `checkpoint`, which is the greatest that is known from elsewhere."""
        is_ours = False
        while not is_ours:
            earlier = await self._checkpoint_keys()
            last = _number(earlier[-1]) if earlier else 0
            taken = msgspec.structs.replace(checkpoint, term=max(last, checkpoint.term) + 1)
            name, raw = _checkpoint_name(taken.term), msgspec.msgpack.encode(taken)
            is_ours = await self._ray.kv_put(self._name(name), raw, overwrite=False)
        self._checkpoint = name
        for key in earlier:
            if _number(key):  # else it is a prefix of all others
                await self._ray.kv_delete(key)
        return taken

    async def write(self, checkpoint: ClusterCheckpoint) -> None:
        """Replace what this manager wrote before. Comes after `take_over`."""
        assert self._checkpoint, "a manager takes over first"
        await self._put(self._checkpoint, checkpoint)

    async def _checkpoint_keys(self) -> list[bytes]:
        """The last one counts."""
        return await self._ray.kv_keys(self._name(_CHECKPOINT))

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


def _checkpoint_name(number: int) -> bytes:
    """Names sort as their numbers do."""
    return b"%s-%0*d" % (_CHECKPOINT, _DIGITS, number)


def _number(key: bytes) -> int:
    """Earlier versions wrote one checkpoint, without a number."""
    number = key.rpartition(b"-")[2]
    return int(number) if number.isdigit() else 0
