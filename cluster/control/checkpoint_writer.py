"""The checkpoints that one manager writes, for as long as it leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from swell.cluster.control.checkpoint_store import CheckpointStore, ClusterCheckpoint
from swell.configs.log import StructuredLogger
from swell.coordinator.ground import Ground

_PAUSE_S = 1.0
"""Before what could not be written is tried again."""
_OWNER_BITS = 64


class CheckpointWriter:
    """One manager's checkpoints. The manager that took over last leads, and writes. All methods run
    in one event loop."""

    def __init__(self, store: CheckpointStore, data: int, ground: Ground) -> None:
        """`data`: `parallel.data`."""
        self.owner = f"{ground.random_bits(_OWNER_BITS):0{_OWNER_BITS // 4}x}"
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
                write = self._store.write if self._has_taken_over else self._store.take_over
                await write(checkpoint)
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
