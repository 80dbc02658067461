"""Writes the checkpoints of one manager while it leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from swell.cluster.control.plan.checkpoint import ClusterCheckpoint, DrainRecord
from swell.cluster.control.plan.versions import UpgradeRecord
from swell.cluster.control.ray.checkpoint_store import CheckpointStore
from swell.configs.runtime.log import StructuredLogger
from swell.configs.schema import Config
from swell.coordinator.manager_state import DesiredState, ManagerId
from swell.coordinator.transport.runtime import Runtime

_PAUSE_S = 1.0
"""First delay before a failed read or write is retried. Each further delay is twice as long, up to
`_LONGEST_PAUSE_S`."""
_LONGEST_PAUSE_S = 10.0
_FRESH_S = 30.0
"""Maximum age of a failure that is reported as current: longer than a delay plus the next failing
attempt."""
_OWNER_BITS = 64


class CheckpointWriter:
    """The checkpoints of one manager. The manager that took over last leads and writes. All methods
    run in one event loop."""

    def __init__(self, store: CheckpointStore, config: Config, runtime: Runtime) -> None:
        self.owner = f"{runtime.random_bits(_OWNER_BITS):0{_OWNER_BITS // 4}x}"
        self._store = store
        self._data = config.parallel.data
        self._stall_timeout_s = config.cluster.stall_timeout_s
        self._newest = ClusterCheckpoint()
        """The newest checkpoint that this manager has made."""
        self._saved = ClusterCheckpoint()
        """The stored checkpoint."""
        self._is_saving = False
        """`save_until_written` is running."""
        self._write_lock = asyncio.Lock()
        self._silent_since: float | None = None
        """When the store first failed since its last answer."""
        self._next_try = 0.0
        """When the store is tried again. Both times are by the clock of the event loop."""
        self._log = StructuredLogger("cluster.checkpoints")

    async def claim(self, known_term: int = 0) -> None:
        """Claims the next term, which is greater than each stored one and than `known_term`."""
        term = await self._store.claim(self.owner, known_term)
        self._newest = ClusterCheckpoint().with_age(term, 0)

    async def take_over(self, kept: DesiredState) -> ClusterCheckpoint:
        """Returns the state that the previous manager left; an empty checkpoint if its
        configuration was a different one. Requires `claim`. If its checkpoint is missing or older
        than `kept`, the state that coordinator and engines of this configuration had after the
        claim, then `kept` counts. If `parallel.data` has changed, it is the new target, because
        it is the newest request."""
        previous = await self._store.read()
        if previous.cluster_id != self._store.cluster_id:
            previous = ClusterCheckpoint()
        if kept.age > previous.desired.age:
            age = previous.desired.age
            self._log.warning("checkpoint is missing or older", kept=kept.age, age=age)
            previous = replace(previous, cluster_id=self._store.cluster_id, desired=kept)
        self._newest = self._newest.with_age(self.manager_id().term, previous.desired.number)
        if previous.desired.data in (0, self._data):
            return previous
        return replace(previous, desired=replace(previous.desired, target=self._data))

    @property
    def error(self) -> str | None:
        """Actions that the manager cannot do while the store fails, and when the store is tried
        again."""
        now = asyncio.get_running_loop().time()
        if self._silent_since is None or now > self._next_try + _FRESH_S:
            return None
        wait_s = max(0.0, self._next_try - now)
        again = f"in {wait_s:.0f} s" if wait_s else "now"
        return (
            f"Ray's GCS has not answered for {now - self._silent_since:.0f} s: no engine can be "
            f"started or stopped; the next try is {again}"
        )

    def manager_id(self) -> ManagerId:
        """Returns the id of this manager. Its term is known after `claim`."""
        return ManagerId(self.owner, self._newest.desired.term)

    async def is_leader(self) -> bool:
        """Whether no other manager has taken over. True if the store does not answer, because then
        none can take over."""
        owner = await self._read_owner()
        return owner is None or owner in ("", self.owner)

    async def is_leader_within(self, timeout_s: float) -> bool:
        """Like `is_leader`, for a caller that cannot wait long. True after the timeout: while the
        store is slow, no successor can take over either."""
        try:
            return await asyncio.wait_for(self.is_leader(), timeout_s)
        except TimeoutError:
            return True

    async def _read_owner(self) -> str | None:
        """Returns the owner of the checkpoint; None: the store does not answer."""
        try:
            owner = await self._store.owner()
        except Exception as error:
            self._on_silence(error)
            return None
        self._silent_since = None
        return owner

    def _on_silence(self, error: Exception) -> float:
        """Records a failure of the store. Returns the delay before the next attempt: as long as the
        store has been silent, within bounds."""
        now = asyncio.get_running_loop().time()
        self._silent_since = now if self._silent_since is None else self._silent_since
        wait_s = min(max(now - self._silent_since, _PAUSE_S), _LONGEST_PAUSE_S)
        self._next_try = now + wait_s
        self._log.warning("no checkpoint store", error=f"{type(error).__name__}: {error}")
        return wait_s

    async def confirm_leader(self) -> bool:
        """Like `is_leader`, but waits until the store answers. If it did not answer at first, this
        manager was cut off and may have been replaced, so the owner is read again after
        `stall_timeout_s`."""
        was_away = False
        while True:
            owner = await self._read_owner()
            if owner is None:
                was_away = True
                await asyncio.sleep(self._next_try - asyncio.get_running_loop().time())
                continue
            if not was_away:
                return owner in ("", self.owner)
            was_away = False
            await asyncio.sleep(self._stall_timeout_s)

    def make(
        self, desired: DesiredState, upgrade: UpgradeRecord, drains: tuple[DrainRecord, ...]
    ) -> ClusterCheckpoint:
        """Returns the next checkpoint, or the newest one if nothing has changed. Sets the owner,
        `data` and the age of the desired state."""
        term, number = self._newest.desired.age
        desired = replace(desired, owner=self.owner, data=self._data)
        made = ClusterCheckpoint(desired, self._store.cluster_id, upgrade, drains)
        if made.with_age(term, number) != self._newest:
            self._newest = made.with_age(term, number + 1)
        return self._newest

    async def save(self, checkpoint: ClusterCheckpoint) -> bool:
        """Stores the checkpoint so that it survives the manager. Requires `take_over`. Returns
        False if another manager leads, without writing if it leads already. One that takes over
        during the write may or may not have read the checkpoint; one that takes over later reads
        it."""
        async with self._write_lock:
            if checkpoint != self._saved:
                if not await self.is_leader():
                    return False
                await self._store.write(checkpoint)
            if await self._store.owner() != self.owner:
                return False
            self._saved = checkpoint
            return True

    async def save_until_written(self, make: Callable[[], ClusterCheckpoint]) -> None:
        """Writes the newest checkpoint, and retries until it is written."""
        if self._is_saving:
            return
        self._is_saving = True
        try:
            while make() != self._saved:
                try:
                    if not await self.save(make()):
                        return
                except Exception as error:
                    await asyncio.sleep(self._on_silence(error))
                else:
                    self._silent_since = None
        finally:
            self._is_saving = False

    async def clear(self) -> None:
        await self._store.clear()
