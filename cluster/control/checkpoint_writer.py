"""One manager's hold on the notes: the one that took over last rules, and writes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable

import msgspec

from swell.cluster.control.checkpoint_store import CheckpointStore, ClusterCheckpoint
from swell.configs.log import StructuredLogger

_PAUSE_S = 1.0
"""Before what could not be written is tried again."""


class CheckpointWriter:
    """All methods run in one event loop."""

    def __init__(self, notes: CheckpointStore, data: int) -> None:
        """`data`: `parallel.data`."""
        self.owner = secrets.token_hex(8)
        self._notes = notes
        self._data = data
        self._saved = ClusterCheckpoint()
        """What is written down."""
        self._has_taken_over = False
        self._keeping = False
        self._writing = asyncio.Lock()
        self._log = StructuredLogger("cluster.notes")

    async def before(self) -> ClusterCheckpoint:
        """What the manager before has left: nothing, if its configuration was another one. Another
        `parallel.data` is a new target: it was asked for last."""
        kept = await self._notes.read()
        if kept.identity != self._notes.identity:
            return ClusterCheckpoint()
        same = kept.data in (0, self._data)
        return kept if same else msgspec.structs.replace(kept, target=self._data)

    async def rules(self) -> bool:
        """Whether no other manager has taken over. Without an answer none can have."""
        try:
            return (await self._notes.read()).owner in ("", self.owner)
        except Exception as error:
            self._log.warning("notes cannot be read", error=f"{type(error).__name__}: {error}")
            return True

    def note(self, target: int, pause_requested: bool, served: bool) -> ClusterCheckpoint:
        return ClusterCheckpoint(
            self.owner, self._notes.identity, target, pause_requested, served, self._data
        )

    async def save(self, note: ClusterCheckpoint) -> bool:
        """Returns when this outlives the manager. The first time takes over from another one;
        afterwards a manager that rules no more writes nothing, and hears False."""
        async with self._writing:
            if self._has_taken_over and not await self.rules():
                return False
            if note != self._saved:
                await self._notes.write(note)
                self._saved, self._has_taken_over = note, True
            return True

    async def keep(self, wanted: Callable[[], ClusterCheckpoint]) -> None:
        """Write down what is wanted, as often as it takes."""
        if self._keeping:
            return
        self._keeping = True
        try:
            while wanted() != self._saved:
                try:
                    if not await self.save(wanted()):
                        return
                except Exception as error:
                    self._log.warning("not noted", error=f"{type(error).__name__}: {error}")
                    await asyncio.sleep(_PAUSE_S)
        finally:
            self._keeping = False

    async def clear(self) -> None:
        await self._notes.clear()
