"""The engines of a cluster: how they start, join, leave, die and are found missing. No decisions.

Ranks move from `starting` to `engines` when they have joined, and leave through `ending`, where
they stay until their names and resources are free again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from swell.cluster.control.actor_errors import ActorRaised
from swell.cluster.control.batches import in_batches
from swell.cluster.control.coordinator_handle import CoordinatorHandle
from swell.cluster.control.drain import Drain
from swell.cluster.control.drain_record import DrainRecord
from swell.cluster.control.engine_handle import EngineHandle, StartFailed
from swell.cluster.control.fleet_view import FleetView, Intent, Place
from swell.cluster.control.placement import Placement
from swell.cluster.control.task_set import TaskSet
from swell.cluster.control.versions import Version
from swell.configs.log import StructuredLogger
from swell.configs.schema import ClusterConfig
from swell.coordinator.ground import Ground
from swell.coordinator.roster import MemberState
from swell.coordinator.service import Membership
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
        self._num_stalled_seen = 0
        """Entries of `Membership.stalled_engines` that were handled."""
        self._log = StructuredLogger("cluster.fleet")
        self.tasks = TaskSet(self._log, on_change)

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
        self, versions: Sequence[Version], drains: Sequence[DrainRecord]
    ) -> list[EngineHandle]:
        """Take over the engines of these versions that an earlier manager left, and its drains.
        Returns those that still have to load or to join: they are in `starting`, for `grow`."""
        serving, newcomers = await self._placement.adopt(versions)
        records = {record.name: record for record in drains}
        for handle in serving:
            self._add_engine(handle)
            self._watch(handle)
            if (record := records.get(handle.name)) is not None:
                self._drain.resume(handle, record)
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
                on_failed(by_rank[rank], error)
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

    async def _join_batch(self, handles: list[EngineHandle]) -> dict[int, Exception]:
        """They serve then, but for those that were cancelled before it began, and for those that
        have failed: why, by rank."""
        handles = [handle for handle in handles if not handle.leaving]
        for handle in handles:
            self._watch(handle)
        async with self.group_change_lock:
            handles = [handle for handle in handles if not handle.leaving]
            failures: dict[int, Exception] = {
                handle.rank: StartFailed(
                    f"it ended before it joined: {handle.ended}", permanent=False
                )
                for handle in handles
                if handle.ended is not None
            }
            living = [handle for handle in handles if handle.rank not in failures]
            failures |= await self._join(living) if living else {}
        for handle in handles:
            if handle.rank not in failures:
                del self.starting[handle.rank]
                self._add_engine(handle)
        ends = (self._placement.kill(handle) for handle in handles if handle.rank in failures)
        await asyncio.gather(*ends, return_exceptions=True)
        return failures

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

    async def _join(self, handles: list[EngineHandle]) -> dict[int, Exception]:
        """Returns why those that have not joined did not, by rank; their group forms without them.
        One that dies meanwhile is removed."""
        try:
            with self._transition(handles):
                refused = await self._coordinator.join([handle.member for handle in handles])
        except Exception as error:
            return {handle.rank: error for handle in handles}
        return {rank: StartFailed(reason, permanent=False) for rank, reason in refused.items()}

    @contextlib.contextmanager
    def _transition(self, handles: list[EngineHandle]) -> Iterator[None]:
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
        handle.is_extra = False
        handle.joined_at = asyncio.get_running_loop().time()
        self.engines[handle.rank] = handle
        if handle.ended is not None:
            self.tasks.spawn(self._on_engine_dead(handle, handle.ended))

    # ---------------------------------------------------------------- leaving

    def leave(self, rank: int, timeout_s: float, *, is_drain: bool = False) -> None:
        """It may finish what it has, for so long."""
        intent = Intent.DRAIN if is_drain else Intent.LEAVE
        self._drain.add(self.engines[rank], timeout_s, intent)

    def set_drain_time(self, timeout_s: float) -> None:
        """Engines that leave have as long as this from now on, unless they were named."""
        self._drain.set_time(timeout_s)

    @property
    def drains(self) -> tuple[DrainRecord, ...]:
        """What a successor of the manager goes on with."""
        return self._drain.records()

    def move(self, rank: int) -> None:
        """Its host goes away: another one is started in its place."""
        self.engines[rank].intent = Intent.MOVE

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
        self.engines[rank].intent = Intent.STAY
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

    async def _detach(self, handles: list[EngineHandle]) -> None:
        """Take engines out and end them, but for those that died or are kept meanwhile."""
        async with self.group_change_lock:
            handles = [h for h in handles if h.leaving and self.engines.get(h.rank) is h]
            with self._transition(handles):
                if handles:
                    await self._coordinator.detach([handle.rank for handle in handles])
        handles = [handle for handle in handles if self.engines.get(handle.rank) is handle]
        for handle in handles:
            self.ending[handle.rank] = self.engines.pop(handle.rank)
        try:
            await asyncio.gather(*(self._placement.end(handle) for handle in handles))
        finally:
            for handle in handles:
                del self.ending[handle.rank]
            self.on_change()

    # ---------------------------------------------------------------- the roster

    async def compare(self, now: Membership) -> None:
        """Correct what differs: engines that are not in the roster or have another state there, and
        members that are no engines of this cluster."""
        stalled, seen = now.stalled_engines, self._num_stalled_seen
        self._num_stalled_seen = len(stalled)
        fresh = stalled[seen:] if seen <= len(stalled) else stalled
        reasons = {engine.rank: engine.reason for engine in fresh}
        for rank, handle in list(self.engines.items()):
            assert handle.ready is not None
            member = now.view.roster.find(rank, handle.ready.incarnation)
            if handle.in_transition:
                continue
            if member is None:
                self.tasks.spawn(self._on_missing(handle, reasons.get(rank)))
            elif handle.leaving and member.state is MemberState.ACTIVE:
                await self._coordinator.leave([rank])
            elif not handle.leaving and member.state is MemberState.LEAVING:
                await self._coordinator.cancel_leave([rank])
        ours = {*self.engines, *self.starting, *self.ending}
        unknown_ranks = [rank for rank in now.view.roster.ranks if rank not in ours]
        if unknown_ranks:
            await self._coordinator.remove_failed(unknown_ranks)

    # ---------------------------------------------------------------- dying

    def _watch(self, handle: EngineHandle) -> None:
        async def watch() -> None:
            handle.ended = await self._placement.ended(handle)
            await self._on_engine_dead(handle, handle.ended)

        handle.exit_watcher = self.tasks.spawn(watch())

    async def _on_missing(self, handle: EngineHandle, reason: str | None) -> None:
        """The roster is without it. `reason`: it was found to have stopped. Else the coordinator
        does not know it, and if it answers, it joins again."""
        with self._transition([handle]):
            reason = reason or await self._rejoin(handle)
        if reason is not None:
            await self._on_engine_dead(handle, reason, stopped_s=self._config.stall_timeout_s)

    async def _rejoin(self, handle: EngineHandle) -> str | None:
        """Why it cannot. If the coordinator does not answer, a later view decides."""
        try:
            await self._placement.refresh(handle)
            async with self.group_change_lock:
                if self.engines.get(handle.rank) is handle:  # not detached meanwhile
                    for failure in (await self._join([handle])).values():
                        if isinstance(failure, StartFailed | ActorRaised):
                            raise failure
        except Exception as error:
            return f"it is not in the roster, and cannot be: {type(error).__name__}: {error}"
        return None

    async def _on_engine_dead(self, handle: EngineHandle, why: str, stopped_s: float = 0) -> None:
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
