"""What must outlive manager and coordinator together: it is kept in Ray's GCS.

A manager writes down a request before it says that it has accepted it, so its successor goes on
with that whatever else has died. The coordinator's keys and port are here for the same
reason: engines and ingresses know no other. `close` of the application forgets all of it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from ray.experimental import internal_kv

from swell.configs.log import StructuredLogger
from swell.coordinator.service import CoordinatorEndpoint

T = TypeVar("T")

_NAMESPACE = b"swell"
_ANSWER_S = 10.0
"""How long Ray's GCS may take to answer."""
_PAUSE_S = 1.0
"""Before what could not be written is tried again."""


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

    def __init__(self, namespace: str, identity: str) -> None:
        self.identity = identity
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
        await _call_gcs(partial(internal_kv._internal_kv_del, del_by_prefix=True), self._name(b""))

    async def _get_or_make(self, name: bytes, kind: type[T], make: Callable[[], T]) -> T:
        """Two managers that come at once agree on the first one's."""
        found = await self._get(name, kind)
        if found is None:
            await self._put(name, make(), overwrite=False)
            found = await self._get(name, kind)
        assert found is not None, "it was put a moment ago, and is removed with the application"
        return found

    async def _get(self, name: bytes, kind: type[T]) -> T | None:
        raw = await _call_gcs(internal_kv._internal_kv_get, self._name(name))
        return msgspec.msgpack.decode(raw, type=kind) if raw else None

    async def _put(self, name: bytes, value: object, *, overwrite: bool = True) -> None:
        raw = msgspec.msgpack.encode(value)
        await _call_gcs(internal_kv._internal_kv_put, self._name(name), raw, overwrite)

    def _name(self, name: bytes) -> bytes:
        return self._key + b":" + name


class CheckpointWriter:
    """One manager's checkpoints. The manager that took over last leads, and writes. All methods run
    in one event loop."""

    def __init__(self, store: CheckpointStore, data: int) -> None:
        """`data`: `parallel.data`."""
        self.owner = secrets.token_hex(8)
        self._store = store
        self._data = data
        self._saved = ClusterCheckpoint()
        """What is written down."""
        self._has_taken_over = False
        self._is_saving = False
        """`save_until_written` runs."""
        self._write_lock = asyncio.Lock()
        self._log = StructuredLogger("cluster.checkpoints")

    async def load_previous(self) -> ClusterCheckpoint:
        """What the manager before has left: nothing, if its configuration was another one. Another
        `parallel.data` is a new target: it was requested last."""
        previous = await self._store.read()
        if previous.identity != self._store.identity:
            return ClusterCheckpoint()
        same = previous.data in (0, self._data)
        return previous if same else msgspec.structs.replace(previous, target=self._data)

    async def is_leader(self) -> bool:
        """Whether no other manager has taken over. Where the store does not answer, none can."""
        try:
            return (await self._store.read()).owner in ("", self.owner)
        except Exception as error:
            self._log.warning("checkpoint cannot be read", error=f"{type(error).__name__}: {error}")
            return True

    def make(self, target: int, pause_requested: bool, served: bool) -> ClusterCheckpoint:
        return ClusterCheckpoint(
            self.owner, self._store.identity, target, pause_requested, served, self._data
        )

    async def save(self, checkpoint: ClusterCheckpoint) -> bool:
        """Returns when this outlives the manager. The first time takes over from another one;
        afterwards False: another manager leads, and nothing was written."""
        async with self._write_lock:
            if self._has_taken_over and not await self.is_leader():
                return False
            if checkpoint != self._saved:
                await self._store.write(checkpoint)
                self._saved, self._has_taken_over = checkpoint, True
            return True

    async def save_until_written(self, make: Callable[[], ClusterCheckpoint]) -> None:
        """Write the newest checkpoint, and try again until it is written."""
        if self._is_saving:
            return
        self._is_saving = True
        try:
            while make() != self._saved:
                try:
                    if not await self.save(make()):
                        return
                except Exception as error:
                    self._log.warning(
                        "checkpoint not written", error=f"{type(error).__name__}: {error}"
                    )
                    await asyncio.sleep(_PAUSE_S)
        finally:
            self._is_saving = False

    async def clear(self) -> None:
        await self._store.clear()


async def _call_gcs(call: Callable[..., Any], *args: object) -> Any:
    """A call that blocks while the GCS is away."""
    async with asyncio.timeout(_ANSWER_S):
        return await asyncio.to_thread(call, *args, namespace=_NAMESPACE)
