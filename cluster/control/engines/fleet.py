"""The engines of a cluster: how they start, join, leave and die. No decisions.

Ranks move from `starting` to `engines` when they have joined. When they leave they move to
`ending`, where they stay until their names and resources are free again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence

from swell.cluster.control.engines.concurrent_tasks import TaskSet, in_batches
from swell.cluster.control.engines.drain import Departure, Drain
from swell.cluster.control.engines.engine_handle import EngineHandle, StartFailed, WeightsRefused
from swell.cluster.control.engines.placement import Adopted, Placement
from swell.cluster.control.plan.checkpoint import DrainRecord
from swell.cluster.control.plan.fleet_view import FleetView, Intent, Place
from swell.cluster.control.plan.versions import Version
from swell.cluster.control.ray.coordinator_handle import CoordinatorHandle
from swell.configs.runtime.log import StructuredLogger
from swell.configs.schema import ClusterConfig
from swell.coordinator.roster import Member
from swell.coordinator.transport.runtime import Runtime

_PAUSE_S = 1.0
"""Delay between a failed drain and the next attempt."""

OnDeath = Callable[[EngineHandle, float, str], None]
"""Called with the engine, the seconds that it served, and the reason why it died."""
OnFailed = Callable[[EngineHandle, Exception], None]
"""Called with an engine that did not start, and the reason."""
DrainStep = Callable[[], Awaitable[None]]
"""`Drain.mark` or `Drain.run`."""


class Fleet:
    """The engines of one manager. All methods run in one event loop. `on_change` is called after
    each change."""

    def __init__(
        self,
        config: ClusterConfig,
        coordinator: CoordinatorHandle,
        placement: Placement,
        runtime: Runtime,
        on_death: OnDeath,
        *,
        on_change: Callable[[], None],
    ) -> None:
        self.engines: dict[int, EngineHandle] = {}
        self.starting: dict[int, EngineHandle] = {}
        self._asked: set[EngineHandle] = set()
        """Starting engines that are asked what they are doing."""
        self.ending: dict[int, EngineHandle] = {}
        self.ended: dict[int, int] = {}
        """Rank -> incarnation of the last engine that this manager took out of the roster, to end
        or to reload it, or because it was dead."""
        self.group_change_lock = asyncio.Lock()
        """Held while the group of engines changes: one change at a time."""
        self._config = config
        self._coordinator, self._placement = coordinator, placement
        self._on_death, self.on_change = on_death, on_change
        self._drain = Drain(
            config.load_report_s, coordinator, runtime, self.engines, self._detach, on_change
        )
        self._inherited: tuple[DrainRecord, ...] = ()
        """Drain records of an earlier manager, until its engines are adopted."""
        self._drain_steps: set[DrainStep] = set()
        """The steps of the drain that run now."""
        self._vacating: frozenset[int] = frozenset()
        self._is_reserved = False
        self._reloading: list[EngineHandle] = []
        """The engines of `starting` that the next `take_reloading` returns."""
        self._log = StructuredLogger("cluster.fleet")
        self.tasks = TaskSet(self._log, on_change)

    @property
    def handles(self) -> list[EngineHandle]:
        """All engines that must be terminated at some time."""
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

    def inherit(self, drains: tuple[DrainRecord, ...]) -> None:
        """Keeps the drain records of an earlier manager for `adopt`, and in `drains` until then."""
        self._inherited = drains

    async def adopt(self, versions: Sequence[Version], outdated: Collection[str]) -> Adopted:
        """Takes over the engines of these versions that an earlier manager left, and its drains.
        The engines that still have to load or join are in `starting`, for `grow`. A leaving engine
        of an `outdated` version without a drain record stays: it was reloading. One that was to
        stop and is out of the roster has left, and is ended."""
        adopted = await self._placement.adopt(versions)
        records = {record.name: record for record in self._inherited}
        self._inherited = ()
        by_name = {version.name: version for version in versions}
        for handle in adopted.serving:
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
        newcomers = []
        for handle in adopted.newcomers:
            record = records.get(handle.name)
            if record is None or record.next_version:
                self.starting[handle.rank] = handle
                newcomers.append(handle)
                continue
            handle.intent = Intent.DRAIN if record.is_named else Intent.LEAVE
            handle.drain = record
            self.ending[handle.rank] = handle
            self.tasks.spawn(self._end([handle]))
        return adopted._replace(newcomers=newcomers)

    def add_starting(self, versions: Mapping[int, Version]) -> list[EngineHandle]:
        """Adds new engines to `starting`, for `grow`. `versions`: by rank."""
        handles = [self._placement.plan(rank, version) for rank, version in versions.items()]
        self.starting.update({handle.rank: handle for handle in handles})
        return handles

    async def grow(
        self,
        handles: list[EngineHandle],
        on_joined: Callable[[list[int]], None],
        on_failed: OnFailed,
    ) -> None:
        """Starts engines of `starting` concurrently. Engines that become ready at about the same
        time join in one epoch, and `on_joined` is called with their ranks. `on_failed` is called at
        once for each engine that fails, except for cancelled ones."""
        by_rank = {handle.rank: handle for handle in handles}

        def fail(rank: int, error: Exception) -> None:
            if not by_rank[rank].leaving:
                del self.starting[rank]
                try:
                    on_failed(by_rank[rank], error)
                finally:
                    if isinstance(error, WeightsRefused):
                        self._reload(by_rank[rank], error.version)
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

    def _reload(self, left: EngineHandle, version: Version) -> None:
        """Starts an engine that has left again, with other weights: it joins as another engine."""
        handle = left.reloading(version)
        self.starting[handle.rank] = handle
        self._reloading.append(handle)

    def take_reloading(self) -> list[EngineHandle]:
        """Returns engines of `starting` that left to load other weights, for `grow`, each once."""
        taken, self._reloading = self._reloading, []
        return [handle for handle in taken if self.starting.get(handle.rank) is handle]

    async def _join_batch(self, handles: list[EngineHandle]) -> dict[int, Exception]:
        """Lets engines join, except cancelled ones. Returns why the others failed, by rank."""
        handles = [handle for handle in handles if not handle.leaving]
        for handle in handles:
            self._watch(handle)
        async with self.group_change_lock:
            handles = [handle for handle in handles if not handle.leaving]
            failures = await self.join(handles) if handles else {}
        for handle in handles:
            if handle.rank not in failures:
                del self.starting[handle.rank]
                self._add_engine(handle)
        ends = (self._placement.kill(handle) for handle in handles if handle.rank in failures)
        await asyncio.gather(*ends, return_exceptions=True)
        return failures

    async def _prepare(self, handle: EngineHandle) -> None:
        """Waits until the engine is ready or was cancelled. Raises why it cannot become ready."""
        if handle.leaving:
            return
        handle.starting = asyncio.create_task(self._placement.start(handle, self.on_change))
        try:
            await handle.starting
        except asyncio.CancelledError:
            if not handle.leaving:
                raise

    def cancel_start(self, rank: int) -> None:
        """Cancels and terminates a starting engine that is not needed any more and has not
        begun to join."""
        handle = self.starting[rank]
        handle.intent = Intent.LEAVE
        if handle.starting is not None:
            handle.starting.cancel()
        self.tasks.spawn(self._discard(handle))

    async def _discard(self, handle: EngineHandle) -> None:
        try:
            if await self._may_end([handle]):  # else the next manager may have adopted it
                await self._placement.end(handle)
                # A restarted coordinator treats every engine that reports to it as a member.
                await self._coordinator.remove_failed([handle.rank])
        finally:
            del self.starting[handle.rank]
            self.on_change()

    async def join(self, handles: list[EngineHandle]) -> dict[int, Exception]:
        """Adds engines to the roster. Returns why the others did not join, by rank; the group forms
        without them. An engine that dies meanwhile is removed."""

        def members() -> list[Member]:
            return [handle.member for handle in handles]

        def dead() -> dict[int, str]:
            return {
                handle.rank: f"it terminated before it joined: {handle.ended}"
                for handle in handles
                if handle.ended is not None
            }

        try:
            with self.transition(handles):
                ended = {self.ended[each.rank] for each in handles if each.rank in self.ended}
                refused = await self._coordinator.join(members, ended, dead)
        except Exception as error:
            return {handle.rank: error for handle in handles}
        return {rank: StartFailed(reason, permanent=False) for rank, reason in refused.items()}

    @contextlib.contextmanager
    def transition(self, handles: list[EngineHandle]) -> Iterator[None]:
        """Marks that the membership of these engines is changing."""
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

    def _remove_engine(self, handle: EngineHandle) -> None:
        assert handle.ready is not None
        self.ended[handle.rank] = handle.ready.incarnation
        del self.engines[handle.rank]

    # ---------------------------------------------------------------- leaving

    def leave(self, rank: int, timeout_s: float, *, is_drain: bool = False) -> None:
        """Lets an engine leave. It has `timeout_s` to finish its requests."""
        intent = Intent.DRAIN if is_drain else Intent.LEAVE
        self.engines[rank].next_version = None
        self._drain.add(self.engines[rank], timeout_s, intent)

    def reload(self, rank: int, version: Version, timeout_s: float) -> None:
        """Lets an engine leave as `leave` does; then its processes run `version` and join again."""
        self.engines[rank].next_version = version
        self._drain.add(self.engines[rank], timeout_s, Intent.RELOAD)

    def set_drain_time(self, timeout_s: float) -> None:
        """Restarts the drain time of engines with `Intent.LEAVE`, with this length."""
        self._drain.set_time(timeout_s)

    @property
    def drains(self) -> tuple[DrainRecord, ...]:
        """Drain records, with which a successor of the manager continues. A drain ends when its
        engine has terminated: until then a coordinator that restarts lists the engine as active."""
        ending = [handle for handle in self.ending.values() if handle.leaving]
        own = tuple(each.drain for each in (*self._drain.leaving, *ending) if each.drain)
        return self._inherited + own

    def move(self, rank: int) -> None:
        """Marks an engine whose host will go away: a replacement is started."""
        handle = self.engines[rank]
        handle.intent, handle.next_version = Intent.MOVE, None

    def stay(self, rank: int) -> None:
        """Undoes `move`: the host stays."""
        self.engines[rank].intent = Intent.STAY

    def set_replaced(
        self, held: Mapping[int, bool], vacating: frozenset[int], *, is_reserved: bool
    ) -> None:
        """Sets what an upgrade decides about leaving engines: `Drain.hold`,
        `EngineStatus.is_vacating` and `FleetView.is_reserved`."""
        self._drain.hold(held)
        self._vacating, self._is_reserved = vacating, is_reserved

    def keep(self, rank: int) -> None:
        """Keeps an engine that was leaving."""
        handle = self.engines[rank]
        handle.intent, handle.next_version = Intent.STAY, None
        self.tasks.spawn(self._coordinator.cancel_leave([rank]))

    def drain(self) -> None:
        """Starts to mark and to drain the leaving engines, unless that is running."""
        drain = self._drain
        for engines, step in ((drain.unmarked, drain.mark), (drain.leaving, drain.run)):
            if engines and step not in self._drain_steps:
                self._drain_steps.add(step)
                self.tasks.spawn(self._run_drain(step))

    async def _run_drain(self, step: DrainStep) -> None:
        try:
            await step()
        except Exception:
            await asyncio.sleep(_PAUSE_S)
            raise
        finally:
            self._drain_steps.remove(step)
            self.on_change()

    async def wait_idle(self, timeout_s: float) -> None:
        """Waits until no engine has requests left, or until the timeout."""
        await self._drain.wait_idle(timeout_s)

    async def _detach(self, find: Callable[[], Departure]) -> None:
        """Removes the engines that `find` returns from the roster. Then begins to terminate or to
        reload them, concurrently: other drains do not wait for that."""
        async with self.group_change_lock:
            departure = find()
            handles = [*departure.handles]
            with self.transition(handles):
                if handles:
                    ranks = [handle.rank for handle in handles]
                    roster = await self._coordinator.detach(ranks, departure.idle_epoch)
                    handles = [handle for handle in handles if handle.find_in(roster) is None]
        handles = [handle for handle in handles if self.engines.get(handle.rank) is handle]
        for handle in handles:
            self._remove_engine(handle)
            if handle.next_version is None:
                self.ending[handle.rank] = handle
            else:
                self._reload(handle, handle.next_version)
        ending = [handle for handle in handles if self.ending.get(handle.rank) is handle]
        if ending:
            self.tasks.spawn(self._end(ending))
        self.on_change()

    async def _end(self, handles: list[EngineHandle]) -> None:
        try:
            if await self._may_end(handles):  # else they may serve the next manager
                await asyncio.gather(*(self._placement.end(handle) for handle in handles))
        finally:
            for handle in handles:
                del self.ending[handle.rank]
            self.on_change()

    @property
    def dismissed(self) -> list[EngineHandle]:
        """Handles of the engines that this manager ends: none of them may be in the roster."""
        cancelled = (handle for handle in self.starting.values() if handle.leaving)
        return [*self.ending.values(), *cancelled]

    async def detach_again(self, handles: list[EngineHandle]) -> None:
        """Removes dismissed engines from the roster. A coordinator that restarted before they
        terminated treats them as members, because they report to it. They may still compute, so
        their requests move as those of an engine that leaves."""
        with self.transition(handles):
            async with self.group_change_lock:
                dismissed = self.dismissed
                if ranks := [handle.rank for handle in handles if handle in dismissed]:
                    await self._coordinator.detach(ranks)

    async def _may_end(self, handles: list[EngineHandle]) -> bool:
        """Whether this manager may terminate engines. An engine that is being detached again
        terminates afterwards: otherwise its group would wait for it until it counts as silent."""
        while True:
            may_end = await self._placement.may_end()
            if not any(handle.in_transition for handle in handles):
                return may_end
            async with self.group_change_lock:
                pass  # `detach_again` is over; another manager may lead by now

    # ---------------------------------------------------------------- dying

    def _watch(self, handle: EngineHandle) -> None:
        async def watch() -> None:
            handle.ended = await self._placement.ended(handle)
            await self.on_engine_dead(handle, handle.ended)

        handle.exit_watcher = self.tasks.spawn(watch())

    async def on_engine_dead(self, handle: EngineHandle, why: str, stopped_s: float = 0) -> None:
        """Removes and terminates an engine that died, or that has hung for `stopped_s` seconds."""
        rank, own = handle.rank, None if handle.ready is None else [handle.ready.incarnation]
        if self.starting.get(rank) is handle:
            await self._coordinator.remove_failed([rank], own)
        if self.engines.get(rank) is not handle:
            return
        self._remove_engine(handle)
        self.ending[rank] = handle
        lived_s = asyncio.get_running_loop().time() - handle.joined_at - stopped_s
        self._log.warning("engine died", rank=rank, reason=why, lived_s=round(lived_s, 1))
        self._on_death(handle, lived_s, why)
        try:
            await self._coordinator.remove_failed([rank], own)
        finally:
            try:
                await (self._placement.kill(handle) if stopped_s else self._placement.end(handle))
            finally:  # an engine that cannot be terminated must not count forever
                del self.ending[rank]
                self.on_change()

    async def starting_texts(self) -> list[str]:
        """Returns what the starting engines are doing, for people who wait for them."""
        starting = sorted(self.starting.items())
        found = await asyncio.gather(*(self._placement.status(handle) for _, handle in starting))
        texts = zip(starting, found, strict=True)
        return [f"engine {rank}: {status.text}" for (rank, _), status in texts]

    def ask_starting(self) -> None:
        """Asks the starting engines what they are doing. Their handles have the answers later, so
        an engine that does not answer delays no caller."""
        for handle in self.starting.values():
            if handle not in self._asked:
                self._asked.add(handle)
                self.tasks.spawn(self._read_status(handle))

    async def _read_status(self, handle: EngineHandle) -> None:
        try:
            handle.start_status = await self._placement.status(handle)
        finally:
            self._asked.remove(handle)
