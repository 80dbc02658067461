"""The engines of a cluster: how they start, join, leave, die and are found missing. No decisions.

Ranks move from `starting` to `engines` when they have joined, and leave through `ending`, where
they stay until their names and resources are free again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from swell.cluster.control.batches import in_batches
from swell.cluster.control.coordinator_handle import CoordinatorHandle
from swell.cluster.control.drain import Drain
from swell.cluster.control.drain_record import DrainRecord
from swell.cluster.control.engine_handle import EngineHandle, StartFailed, WeightsRefused
from swell.cluster.control.fleet_view import FleetView, Intent, Place
from swell.cluster.control.placement import Placement
from swell.cluster.control.roster_check import RosterCheck
from swell.cluster.control.task_set import TaskSet
from swell.cluster.control.versions import Version
from swell.configs.log import StructuredLogger
from swell.configs.schema import ClusterConfig
from swell.coordinator.ground import Ground
from swell.coordinator.wire import EngineReport

_PAUSE_S = 1.0
"""After a drain failed, before it begins again."""

OnDeath = Callable[[EngineHandle, float, str], None]
"""Takes the engine, for how many seconds it served, and why it died."""
OnFailed = Callable[[EngineHandle, Exception], None]
"""Takes an engine that did not start, and why."""


class Fleet:
    """All methods run in one event loop. `on_change` is called after each change."""

    def __init__(
        self,
        config: ClusterConfig,
        coordinator: CoordinatorHandle,
        placement: Placement,
        ground: Ground,
        on_death: OnDeath,
        *,
        on_change: Callable[[], None],
    ) -> None:
        self.engines: dict[int, EngineHandle] = {}
        self.starting: dict[int, EngineHandle] = {}
        self.ending: dict[int, EngineHandle] = {}
        self.group_change_lock = asyncio.Lock()
        """Held while the engines' group changes: one change at a time."""
        self._draining = False
        """A task drains the engines that leave."""
        self._config = config
        self._coordinator, self._placement = coordinator, placement
        self._on_death, self.on_change = on_death, on_change
        self._drain = Drain(config.load_report_s, coordinator, ground, self.engines, self._detach)
        self._vacating: frozenset[int] = frozenset()
        self._is_reserved = False
        self._reloading: list[EngineHandle] = []
        """Those of `starting` that wait for `take_reloading`."""
        self._log = StructuredLogger("cluster.fleet")
        self.tasks = TaskSet(self._log, on_change)
        self.roster_check = RosterCheck(self, coordinator, placement, config.stall_timeout_s)

    @property
    def handles(self) -> list[EngineHandle]:
        """Everything that has to be ended some day."""
        return [*self.engines.values(), *self.starting.values(), *self.ending.values()]

    def view(self) -> FleetView:
        tables = (
            (Place.STARTING, self.starting),
            (Place.SERVING, self.engines),
            (Place.ENDING, self.ending),
        )
        found = [
            handle.status(place, is_vacating=rank in self._vacating and handle.leaving)
            for place, table in tables
            for rank, handle in table.items()
        ]
        engines = tuple(sorted(found, key=lambda engine: engine.rank))
        return FleetView(engines, self.group_change_lock.locked(), self._is_reserved)

    # ---------------------------------------------------------------- starting

    async def adopt(
        self,
        versions: Sequence[Version],
        drains: Sequence[DrainRecord],
        outdated: Collection[str],
    ) -> list[EngineHandle]:
        """Take over the engines of these versions that an earlier manager left, and its drains.
        Returns those that still have to load or to join: they are in `starting`, for `grow`. Of the
        `outdated` versions an engine that leaves without a record is kept: it was to reload."""
        serving, newcomers = await self._placement.adopt(versions)
        records = {record.name: record for record in drains}
        by_name = {version.name: version for version in versions}
        for handle in serving:
            self._add_engine(handle)
            self._watch(handle)
            record = records.get(handle.name)
            if record is not None and handle.version_name != record.next_version:
                handle.next_version = by_name.get(record.next_version)
                self._drain.resume(handle, record)
            elif handle.leaving and handle.version_name in outdated:
                self.keep(handle.rank)
            elif handle.leaving:
                self.leave(handle.rank, self._config.drain_timeout_s)
        self.starting.update({handle.rank: handle for handle in newcomers})
        return newcomers

    def add_starting(self, versions: Mapping[int, Version]) -> list[EngineHandle]:
        """New engines, for `grow`, by rank."""
        handles = [self._placement.plan(rank, version) for rank, version in versions.items()]
        self.starting.update({handle.rank: handle for handle in handles})
        return handles

    async def grow(
        self,
        handles: list[EngineHandle],
        on_joined: Callable[[list[int]], None],
        on_failed: OnFailed,
    ) -> None:
        """Start newcomers of `starting` beside each other; those that are ready about the same time
        join in one epoch: `on_joined` gets their ranks. `on_failed` is called at once for each that
        does not, but for those that were cancelled."""
        by_rank = {handle.rank: handle for handle in handles}

        def fail(rank: int, error: Exception) -> None:
            if not by_rank[rank].leaving:
                del self.starting[rank]
                try:
                    on_failed(by_rank[rank], error)
                finally:
                    if isinstance(error, WeightsRefused):
                        self._begin_anew(by_rank[rank], error.version)
                self.on_change()

        async def prepare(handle: EngineHandle) -> None:
            try:
                await self._prepare(handle)
            except Exception as error:
                fail(handle.rank, error)
                raise

        jobs = {rank: prepare(handle) for rank, handle in by_rank.items()}
        prepared = in_batches(jobs, lambda rank: by_rank[rank].waits_for_room is not None)
        async with contextlib.aclosing(prepared) as batches:
            async for batch in batches:
                ready = [by_rank[rank] for rank, error in batch.items() if error is None]
                for rank, error in (await self._join_batch(ready)).items():
                    fail(rank, error)
                on_joined([h.rank for h in ready if self.engines.get(h.rank) is h])
        self.on_change()

    def _begin_anew(self, handle: EngineHandle, version: Version) -> None:
        """Its processes are to run this version, and to join as another engine."""
        handle.begin_anew(version)
        self.starting[handle.rank] = handle
        self._reloading.append(handle)

    def take_reloading(self) -> list[EngineHandle]:
        """Engines of `starting` that have left to get other weights, for `grow`; each once."""
        taken, self._reloading = self._reloading, []
        return [handle for handle in taken if self.starting.get(handle.rank) is handle]

    async def _join_batch(self, handles: list[EngineHandle]) -> dict[int, Exception]:
        """They serve then, but for those that were cancelled before it began, and for those that
        have failed: why, by rank."""
        handles = [handle for handle in handles if not handle.leaving]
        for handle in handles:
            self._watch(handle)
        async with self.group_change_lock:
            await self._forget_earlier(handles)
            handles = [handle for handle in handles if not handle.leaving]
            failures: dict[int, Exception] = {
                handle.rank: StartFailed(
                    f"it ended before it joined: {handle.ended}", permanent=False
                )
                for handle in handles
                if handle.ended is not None
            }
            living = [handle for handle in handles if handle.rank not in failures]
            failures |= await self.join(living) if living else {}
        for handle in handles:
            if handle.rank not in failures:
                del self.starting[handle.rank]
                self._add_engine(handle)
        ends = (self._placement.kill(handle) for handle in handles if handle.rank in failures)
        await asyncio.gather(*ends, return_exceptions=True)
        return failures

    async def _forget_earlier(self, handles: list[EngineHandle]) -> None:
        """A coordinator that was restarted before their earlier servers ended takes those for
        members."""
        if ranks := [handle.rank for handle in handles if handle.previous is not None]:
            with contextlib.suppress(Exception):  # then they are refused, if they are there
                await self._coordinator.remove_failed(ranks)

    async def _prepare(self, handle: EngineHandle) -> None:
        """Returns when the engine is ready or was cancelled. Raises why it is not ready."""
        if handle.leaving:
            return
        handle.starting = asyncio.create_task(self._placement.start(handle))
        try:
            await handle.starting
        except asyncio.CancelledError:
            if not handle.leaving:
                raise

    def cancel_start(self, rank: int) -> None:
        """A newcomer that does not join yet is not wanted any more: it is ended."""
        handle = self.starting[rank]
        handle.intent = Intent.LEAVE
        if handle.starting is not None:
            handle.starting.cancel()
        self.tasks.spawn(self._discard(handle))

    async def _discard(self, handle: EngineHandle) -> None:
        try:
            if await self._placement.may_end():  # else its successor waits for it
                await self._placement.end(handle)
                # A coordinator that was restarted takes every engine that it hears for a member.
                await self._coordinator.remove_failed([handle.rank])
        finally:
            del self.starting[handle.rank]
            self.on_change()

    async def join(self, handles: list[EngineHandle]) -> dict[int, Exception]:
        """Returns why those that have not joined did not, by rank; their group forms without them.
        One that dies meanwhile is removed."""
        try:
            with self.transition(handles):
                refused = await self._coordinator.join([handle.member for handle in handles])
        except Exception as error:
            return {handle.rank: error for handle in handles}
        return {rank: StartFailed(reason, permanent=False) for rank, reason in refused.items()}

    @contextlib.contextmanager
    def transition(self, handles: list[EngineHandle]) -> Iterator[None]:
        """The place of the engines in the roster changes meanwhile."""
        for handle in handles:
            handle.in_transition = True
        self.on_change()
        try:
            yield
        finally:
            for handle in handles:
                handle.in_transition = False
            self.on_change()

    def _add_engine(self, handle: EngineHandle) -> None:
        handle.is_extra, handle.previous = False, None
        handle.joined_at = asyncio.get_running_loop().time()
        self.engines[handle.rank] = handle
        if handle.ended is not None:
            self.tasks.spawn(self.on_engine_dead(handle, handle.ended))

    # ---------------------------------------------------------------- leaving

    def leave(self, rank: int, timeout_s: float, *, is_drain: bool = False) -> None:
        """It may finish what it has, for so long."""
        intent = Intent.DRAIN if is_drain else Intent.LEAVE
        self.engines[rank].next_version = None
        self._drain.add(self.engines[rank], timeout_s, intent)

    def reload(self, rank: int, version: Version, timeout_s: float) -> None:
        """The same, and then its processes run this version, and join again."""
        self.engines[rank].next_version = version
        self._drain.add(self.engines[rank], timeout_s, Intent.RELOAD)

    def set_drain_time(self, timeout_s: float) -> None:
        """Engines that leave have as long as this from now on, unless they were named."""
        self._drain.set_time(timeout_s)

    @property
    def drains(self) -> tuple[DrainRecord, ...]:
        """What a successor of the manager goes on with."""
        return self._drain.records()

    def move(self, rank: int) -> None:
        """Its host goes away: another one is started in its place."""
        handle = self.engines[rank]
        handle.intent, handle.next_version = Intent.MOVE, None

    def stay(self, rank: int) -> None:
        """Its host stays."""
        self.engines[rank].intent = Intent.STAY

    def set_replaced(
        self, held: Mapping[int, bool], vacating: frozenset[int], *, is_reserved: bool
    ) -> None:
        """Of the engines that leave: see `Drain.held`, and `EngineStatus.is_vacating`; and
        `FleetView.is_reserved`."""
        self._drain.held, self._vacating, self._is_reserved = held, vacating, is_reserved

    def keep(self, rank: int) -> None:
        """It was leaving, and is wanted again."""
        handle = self.engines[rank]
        handle.intent, handle.next_version = Intent.STAY, None
        self.tasks.spawn(self._coordinator.cancel_leave([rank]))

    def drain(self) -> None:
        """Begin to drain the engines that leave, if that is not under way."""
        if self._drain.leaving and not self._draining:
            self._draining = True
            self.tasks.spawn(self._drain_all())

    async def _drain_all(self) -> None:
        try:
            await self._drain.run()
        except Exception:
            await asyncio.sleep(_PAUSE_S)
            raise
        finally:
            self._draining = False
            self.on_change()

    async def wait_idle(self, timeout_s: float) -> None:
        """Until no engine has requests left, or the time is over."""
        await self._drain.wait_idle(timeout_s)

    async def _detach(self, handles: list[EngineHandle], idle_epoch: int | None) -> None:
        """Take engines out, but for those that died or are kept meanwhile; end them, unless they
        begin anew. `idle_epoch`: see `CoordinatorHandle.detach`."""
        async with self.group_change_lock:
            handles = [h for h in handles if h.leaving and self.engines.get(h.rank) is h]
            with self.transition(handles):
                if handles:
                    ranks = [handle.rank for handle in handles]
                    roster = await self._coordinator.detach(ranks, idle_epoch)
                    handles = [handle for handle in handles if handle.find_in(roster) is None]
        handles = [handle for handle in handles if self.engines.get(handle.rank) is handle]
        for handle in handles:
            del self.engines[handle.rank]
            if handle.next_version is None:
                self.ending[handle.rank] = handle
            else:
                self._begin_anew(handle, handle.next_version)
        handles = [handle for handle in handles if self.ending.get(handle.rank) is handle]
        try:
            if handles and await self._placement.may_end():  # else they may serve its successor
                await asyncio.gather(*(self._placement.end(handle) for handle in handles))
        finally:
            for handle in handles:
                del self.ending[handle.rank]
            self.on_change()

    # ---------------------------------------------------------------- dying

    def _watch(self, handle: EngineHandle) -> None:
        async def watch() -> None:
            handle.ended = await self._placement.ended(handle)
            await self.on_engine_dead(handle, handle.ended)

        handle.exit_watcher = self.tasks.spawn(watch())

    async def on_engine_dead(self, handle: EngineHandle, why: str, stopped_s: float = 0) -> None:
        """It is dead, or has done nothing for `stopped_s`: it leaves the roster, and is ended."""
        rank = handle.rank
        if self.starting.get(rank) is handle:
            await self._coordinator.remove_failed([rank])
        if self.engines.get(rank) is not handle:
            return
        self.ending[rank] = self.engines.pop(rank)
        lived_s = asyncio.get_running_loop().time() - handle.joined_at - stopped_s
        self._log.warning("engine died", rank=rank, reason=why, lived_s=round(lived_s, 1))
        self._on_death(handle, lived_s, why)
        try:
            await self._coordinator.remove_failed([rank])
        finally:
            try:
                await (self._placement.kill(handle) if stopped_s else self._placement.end(handle))
            finally:  # an engine that could not be ended must not count for ever
                del self.ending[rank]
                self.on_change()

    async def starting_texts(self) -> list[str]:
        """What newcomers are busy with, for people who wait for them."""
        starting = sorted(self.starting.items())
        texts = await asyncio.gather(*(self._placement.status(handle) for _, handle in starting))
        return [f"engine {rank}: {text}" for (rank, _), text in zip(starting, texts, strict=True)]

    async def refresh(self, reports: list[EngineReport]) -> None:
        """Read the workers of engines that have replaced some."""
        for report in reports:
            handle = self.engines.get(report.rank)
            if handle is None or handle.repairs == report.repairs:
                continue
            try:
                await self._placement.refresh(handle)
                handle.repairs = report.repairs
            except Exception as error:
                self._log.warning("engine does not answer", rank=report.rank, error=str(error))
