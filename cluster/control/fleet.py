"""The engines of a cluster: how they start, join, leave, die and are found missing. No decisions.

Ranks move from `starting` to `engines` when they have joined, and leave through `ending`, where
they stay until their names and resources are free again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from swell.cluster.control.coordinator_handle import CoordinatorHandle
from swell.cluster.control.engine_handle import EngineHandle
from swell.cluster.control.fleet_view import EngineStatus, FleetView, Intent, Place
from swell.cluster.control.placement import Placement
from swell.configs.log import StructuredLogger
from swell.configs.schema import ClusterConfig
from swell.coordinator.roster import MemberState
from swell.coordinator.service import Membership
from swell.coordinator.wire import EngineReport

_PAUSE_S = 1.0
"""After a drain failed, before it begins again."""
_IDLE_POLLS = 2
"""A request may be on its way when the first is taken."""

OnDeath = Callable[[int, float, str], None]
"""Takes the rank, for how many seconds it served, and why it died."""


class Fleet:
    """All methods run in one event loop. `on_change` is called after each change."""

    def __init__(
        self,
        config: ClusterConfig,
        coordinator: CoordinatorHandle,
        placement: Placement,
        *,
        on_death: OnDeath,
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
        self._coordinator = coordinator
        self._placement = placement
        self._on_death, self._on_change = on_death, on_change
        self._num_stalled_seen = 0
        """Entries of `Membership.stalled_engines` that were handled."""
        self._tasks: dict[asyncio.Task[None], None] = {}
        """In order of creation."""
        self._log = StructuredLogger("cluster.fleet")

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
            EngineStatus(rank, place, handle.intent, handle.in_transition)
            for place, table in tables
            for rank, handle in table.items()
        ]
        return FleetView(
            tuple(sorted(found, key=lambda engine: engine.rank)), self.group_change_lock.locked()
        )

    @property
    def _leaving(self) -> list[EngineHandle]:
        """Engines that serve and shall leave, by rank."""
        return [handle for _, handle in sorted(self.engines.items()) if handle.leaving]

    # ---------------------------------------------------------------- starting

    async def adopt(self) -> list[EngineHandle]:
        """Take over the engines that an earlier manager left. Returns those that still have to
        load or to join: they are in `starting`, for `grow`."""
        serving, newcomers = await self._placement.adopt()
        for handle in serving:
            self._add_engine(handle)
            self._watch(handle)
            if handle.leaving:
                self.leave(handle.rank, self._config.drain_timeout_s)
        self.starting.update({handle.rank: handle for handle in newcomers})
        return newcomers

    def add_starting(self, ranks: Iterable[int]) -> list[EngineHandle]:
        """New engines, for `grow`."""
        handles = [self._placement.plan(rank) for rank in ranks]
        self.starting.update({handle.rank: handle for handle in handles})
        return handles

    async def grow(self, handles: list[EngineHandle]) -> dict[int, BaseException]:
        """Start newcomers, which are in `starting`, beside each other; those that are ready join
        in one epoch. Returns why the others failed; those that were cancelled are not in it."""
        results = await asyncio.gather(
            *(self._prepare(handle) for handle in handles), return_exceptions=True
        )
        failures = {
            handle.rank: result
            for handle, result in zip(handles, results, strict=True)
            if isinstance(result, BaseException) and not handle.leaving
        }
        ready = [h for h in handles if not (h.rank in failures or h.leaving)]
        try:
            ready = await self._join(ready)
        except Exception as error:
            ready = [handle for handle in ready if not handle.leaving]
            failures.update({handle.rank: error for handle in ready})
            await asyncio.gather(
                *(self._placement.kill(handle) for handle in ready), return_exceptions=True
            )
        for handle in handles:
            if handle.leaving:  # it may have been cancelled since it failed
                failures.pop(handle.rank, None)
            else:
                del self.starting[handle.rank]
        for handle in ready:
            if handle.rank not in failures:
                self._add_engine(handle)
        self._on_change()
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
        self.spawn(self._discard(handle))

    async def _discard(self, handle: EngineHandle) -> None:
        try:
            await self._placement.end(handle)
        finally:
            del self.starting[handle.rank]
            self._on_change()

    async def _join(self, handles: list[EngineHandle]) -> list[EngineHandle]:
        """Returns those that have joined: all that were not cancelled before it began. Raises if
        one of them dies meanwhile: it is removed, and its group does not form."""
        for handle in handles:
            self._watch(handle)
        async with self.group_change_lock:
            handles = [handle for handle in handles if not handle.leaving]
            if handles:
                with self._transition(handles):
                    await self._coordinator.join([handle.member for handle in handles])
        return handles

    @contextlib.contextmanager
    def _transition(self, handles: list[EngineHandle]) -> Iterator[None]:
        """The place of the engines in the roster changes meanwhile."""
        for handle in handles:
            handle.in_transition = True
        self._on_change()
        try:
            yield
        finally:
            for handle in handles:
                handle.in_transition = False

    def _add_engine(self, handle: EngineHandle) -> None:
        handle.joined_at = asyncio.get_running_loop().time()
        self.engines[handle.rank] = handle
        if handle.ended is not None:
            self.spawn(self._on_engine_dead(handle, handle.ended))

    # ---------------------------------------------------------------- leaving

    def leave(self, rank: int, timeout_s: float, *, is_drain: bool = False) -> None:
        """It may finish what it has, for so long: see `_drain`."""
        handle = self.engines[rank]
        handle.intent = Intent.DRAIN if is_drain else Intent.LEAVE
        handle.idle_polls = 0
        handle.leave_deadline_s = asyncio.get_running_loop().time() + timeout_s

    def shorten_drain(self, timeout_s: float) -> None:
        """Engines that leave have no longer than this from now on, unless they were named."""
        latest = asyncio.get_running_loop().time() + timeout_s
        for handle in self._leaving:
            if handle.intent is Intent.LEAVE:
                handle.leave_deadline_s = min(handle.leave_deadline_s, latest)

    def keep(self, rank: int) -> None:
        """It was leaving, and is wanted again."""
        self.engines[rank].intent = Intent.STAY
        self.spawn(self._coordinator.cancel_leave([rank]))

    def drain(self) -> None:
        """Begin to drain the engines that leave, if that is not under way."""
        if self._leaving and not self._draining:
            self._draining = True
            self.spawn(self._drain_all())

    async def _drain_all(self) -> None:
        try:
            await self._drain()
        except Exception:
            await asyncio.sleep(_PAUSE_S)
            raise
        finally:
            self._draining = False
            self._on_change()

    async def _drain(self) -> None:
        """Until no engine is leaving: each is detached when it has finished what it has, or when
        its time is over. A paused engine cannot finish, and is detached then."""
        marked: set[str] = set()
        while self._leaving:
            leaving = [handle for handle in self._leaving if not handle.in_transition]
            marked &= {handle.name for handle in leaving}
            if fresh := [handle for handle in leaving if handle.name not in marked]:
                marked |= {handle.name for handle in fresh}
                await self._coordinator.leave([handle.rank for handle in fresh])
            now = asyncio.get_running_loop().time()
            due = [h for h in leaving if h.idle_polls >= _IDLE_POLLS or now >= h.leave_deadline_s]
            if due:
                await self._detach(due)
            else:
                await self._poll_idle(leaving)

    async def _poll_idle(self, handles: list[EngineHandle]) -> None:
        """Count, a report later, how often in a row each was seen without requests."""
        await asyncio.sleep(2 * self._config.load_report_s)
        view = await self._coordinator.view()
        busy = {report.rank for report in view.reports if report.running + report.waiting}
        for handle in handles:
            handle.idle_polls = 0 if handle.rank in busy else handle.idle_polls + 1

    async def wait_idle(self, timeout_s: float) -> None:
        """Until no engine has requests left, or the time is over."""
        handles = list(self.engines.values())
        for handle in handles:
            handle.idle_polls = 0
        try:
            async with asyncio.timeout(timeout_s):
                while any(handle.idle_polls < _IDLE_POLLS for handle in handles):
                    await self._poll_idle(handles)
        except TimeoutError:
            self._log.info("not drained", ranks=list(self.engines), timeout_s=timeout_s)

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
                self.spawn(self._on_missing(handle, reasons.get(rank)))
            elif handle.leaving and member.state is MemberState.ACTIVE:
                await self._coordinator.leave([rank])
            elif not handle.leaving and member.state is MemberState.LEAVING:
                await self._coordinator.cancel_leave([rank])
        ours = {*self.engines, *self.starting, *self.ending}
        unknown_ranks = [rank for rank in now.view.roster.ranks if rank not in ours]
        if unknown_ranks:
            await self._coordinator.remove_failed(unknown_ranks)
        if self._placement.strays_left:
            self.spawn(self._end_strays())

    async def _end_strays(self) -> None:
        await self._placement.end_strays()

    # ---------------------------------------------------------------- dying

    def _watch(self, handle: EngineHandle) -> None:
        async def watch() -> None:
            handle.ended = await self._placement.ended(handle)
            await self._on_engine_dead(handle, handle.ended)

        handle.exit_watcher = self.spawn(watch())

    async def _on_missing(self, handle: EngineHandle, reason: str | None) -> None:
        """The roster is without it. `reason`: it was found to have stopped. Else the coordinator
        does not know it, and if it answers, it joins again."""
        if reason is None:
            try:
                with self._transition([handle]):
                    await self._placement.refresh(handle)
                    async with self.group_change_lock:
                        if self.engines.get(handle.rank) is handle:  # not detached meanwhile
                            await self._coordinator.join([handle.member])
                return
            except Exception as error:
                reason = f"it is not in the roster, and cannot be: {type(error).__name__}: {error}"
        await self._on_engine_dead(handle, reason, stopped_s=self._config.stall_timeout_s)

    async def _on_engine_dead(
        self, handle: EngineHandle, reason: str, stopped_s: float = 0.0
    ) -> None:
        """An engine is dead, or has done nothing for `stopped_s`: it leaves the roster, and what
        is left of it is ended."""
        rank = handle.rank
        if self.starting.get(rank) is handle:
            await self._coordinator.remove_failed([rank])
        if self.engines.get(rank) is not handle:
            return
        self.ending[rank] = self.engines.pop(rank)
        lived_s = asyncio.get_running_loop().time() - handle.joined_at - stopped_s
        self._log.warning("engine died", rank=rank, reason=reason, lived_s=round(lived_s, 1))
        if not handle.leaving:
            self._on_death(rank, lived_s, reason)
        try:
            await self._coordinator.remove_failed([rank])
        finally:
            try:
                await (self._placement.kill(handle) if stopped_s else self._placement.end(handle))
            finally:  # an engine that could not be ended must not count for ever
                del self.ending[rank]
                self._on_change()

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

    # ---------------------------------------------------------------- tasks

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it beside everything else; what it raises is logged."""

        async def run() -> None:
            try:
                await work
            except Exception as error:
                self._log.error("failed", error=f"{type(error).__name__}: {error}")
                self._on_change()

        task = asyncio.create_task(run())
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        task.add_done_callback(lambda _task: work.close())  # cancelled before it began
        return task

    async def cancel_tasks(self) -> None:
        """Cancel everything that runs, the caller aside, in order of creation."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
