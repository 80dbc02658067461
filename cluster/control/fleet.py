"""The engines of a cluster: how they come, go, die and are missed. What is wanted, others decide.

Ranks move from `starting` to `engines` when they have joined, and leave through `ending`, where
they stay until their names and resources are free again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from swell.cluster.control.coordinator_handle import CoordinatorHandle
from swell.cluster.control.placement import EngineHandle, Placement
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
        self.draining = False
        """Engines are being let go."""
        self._config = config
        self._coordinator = coordinator
        self._placement = placement
        self._on_death, self._on_change = on_death, on_change
        self._verdicts_seen = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = StructuredLogger("cluster.fleet")

    @property
    def staying(self) -> list[EngineHandle]:
        """Engines that serve and shall go on, by rank."""
        return [handle for _, handle in sorted(self.engines.items()) if not handle.leaving]

    @property
    def leaving(self) -> list[EngineHandle]:
        """Engines that serve and shall go, by rank."""
        return [handle for _, handle in sorted(self.engines.items()) if handle.leaving]

    @property
    def going(self) -> bool:
        """Engines serve, start or end that shall go."""
        return any(handle.leaving for handle in self.handles)

    @property
    def coming(self) -> list[EngineHandle]:
        """Engines that start and are still wanted, by rank."""
        return [handle for _, handle in sorted(self.starting.items()) if not handle.leaving]

    @property
    def present(self) -> int:
        """Engines that count towards the target. One that has died counts until it can be
        replaced."""
        ending = sum(not handle.leaving for handle in self.ending.values())
        return len(self.staying) + len(self.coming) + ending

    @property
    def handles(self) -> list[EngineHandle]:
        """Everything that has to be ended some day."""
        return [*self.engines.values(), *self.starting.values(), *self.ending.values()]

    def free_ranks(self, count: int) -> list[int]:
        """The lowest ones."""
        taken = {*self.engines, *self.starting, *self.ending}
        return [rank for rank in range(count + len(taken)) if rank not in taken][:count]

    # ---------------------------------------------------------------- coming

    async def adopt(self) -> list[EngineHandle]:
        """Take over the engines that an earlier manager left. Returns those that still have to
        load or to join: they are in `starting`, for `grow`."""
        serving, newcomers = await self._placement.adopt()
        for handle in serving:
            self._add_engine(handle)
            self._watch(handle)
            if handle.leaving:
                self.leave(handle, self._config.drain_timeout_s)
        self.starting.update({handle.rank: handle for handle in newcomers})
        return newcomers

    async def grow(self, handles: list[EngineHandle]) -> dict[int, BaseException]:
        """Start newcomers, which are in `starting`, beside each other; those that are ready join
        in one epoch. Returns the others, and why; who was called off is in neither."""
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
            if not handle.leaving:
                del self.starting[handle.rank]
        for handle in ready:
            if handle.rank not in failures:
                self._add_engine(handle)
        self._on_change()
        return failures

    async def _prepare(self, handle: EngineHandle) -> None:
        """Returns when the engine is ready or was called off. Raises what kept it from it."""
        if handle.leaving:
            return
        handle.starting = asyncio.create_task(self._placement.start(handle))
        try:
            await handle.starting
        except asyncio.CancelledError:
            if not handle.leaving:
                raise

    def cancel_start(self, handle: EngineHandle) -> None:
        """A newcomer that does not join yet is not wanted any more: it is ended."""
        handle.leaving = True
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
        """Returns who has joined: all that were not called off before it began. Raises if one of
        them dies meanwhile: it is lost, and its group does not form."""
        for handle in handles:
            self._watch(handle)
        async with self.group_change_lock:
            handles = [handle for handle in handles if not handle.leaving]
            if not handles:
                return []
            for handle in handles:
                handle.in_transition = True
            self._on_change()
            try:
                await self._coordinator.join([handle.member for handle in handles])
            finally:
                for handle in handles:
                    handle.in_transition = False
        return handles

    def _add_engine(self, handle: EngineHandle) -> None:
        handle.joined_at = asyncio.get_running_loop().time()
        self.engines[handle.rank] = handle
        if handle.ended is not None:
            self.spawn(self._on_engine_dead(handle, handle.ended))

    # ---------------------------------------------------------------- going

    def leave(self, handle: EngineHandle, timeout_s: float) -> None:
        """It may finish what it has, for so long: see `_drain`."""
        handle.leaving, handle.idle_polls = True, 0
        handle.leave_deadline_s = asyncio.get_running_loop().time() + timeout_s

    def shorten_drain(self, timeout_s: float) -> None:
        """Whoever is leaving has no longer than this from now on, unless it was named."""
        latest = asyncio.get_running_loop().time() + timeout_s
        for handle in self.leaving:
            if not handle.drained:
                handle.leave_deadline_s = min(handle.leave_deadline_s, latest)

    def keep(self, handle: EngineHandle) -> None:
        """It was leaving, and is wanted again."""
        handle.leaving = False
        self.spawn(self._coordinator.cancel_leave([handle.rank]))

    def drain(self) -> None:
        """Begin to let go whoever is leaving, if that is not under way."""
        if self.leaving and not self.draining:
            self.draining = True
            self.spawn(self._drain_all())

    async def _drain_all(self) -> None:
        try:
            await self._drain()
        except Exception:
            await asyncio.sleep(_PAUSE_S)
            raise
        finally:
            self.draining = False
            self._on_change()

    async def _drain(self) -> None:
        """Until no engine is leaving: each goes when it has finished what it has, or when its time
        is over. Who is paused cannot finish, and goes then."""
        told: set[str] = set()
        while self.leaving:
            going = [handle for handle in self.leaving if not handle.in_transition]
            told &= {handle.name for handle in going}
            if fresh := [handle for handle in going if handle.name not in told]:
                told |= {handle.name for handle in fresh}
                await self._coordinator.leave([handle.rank for handle in fresh])
            now = asyncio.get_running_loop().time()
            due = [h for h in going if h.idle_polls >= _IDLE_POLLS or now >= h.leave_deadline_s]
            if due:
                await self._detach(due)
                continue
            await asyncio.sleep(2 * self._config.load_report_s)
            view = await self._coordinator.view()
            busy = {r.rank for r in view.reports if r.running + r.waiting}
            for handle in going:
                handle.idle_polls = 0 if handle.rank in busy else handle.idle_polls + 1

    async def _detach(self, going: list[EngineHandle]) -> None:
        """Take engines out and end them; those that died or are kept meanwhile aside."""
        async with self.group_change_lock:
            going = [h for h in going if h.leaving and self.engines.get(h.rank) is h]
            for handle in going:
                handle.in_transition = True
            self._on_change()
            try:
                if going:
                    await self._coordinator.detach([handle.rank for handle in going])
            finally:
                for handle in going:
                    handle.in_transition = False
        going = [handle for handle in going if self.engines.get(handle.rank) is handle]
        for handle in going:
            self.ending[handle.rank] = self.engines.pop(handle.rank)
        try:
            await asyncio.gather(*(self._placement.end(handle) for handle in going))
        finally:
            for handle in going:
                del self.ending[handle.rank]

    async def wait_idle(self, ranks: list[int], timeout_s: float) -> None:
        """Until the engines have nothing left, or the time is over.

        Two quiet looks in a row, a report apart: a request may be on its way when the first is
        taken.
        """
        quiet = 0
        try:
            async with asyncio.timeout(timeout_s):
                while quiet < 2:
                    await asyncio.sleep(2 * self._config.load_report_s)
                    view = await self._coordinator.view()
                    busy = [r for r in view.reports if r.rank in ranks and r.running + r.waiting]
                    quiet = 0 if busy else quiet + 1
        except TimeoutError:
            self._log.info("not drained", ranks=ranks, timeout_s=timeout_s)

    # ---------------------------------------------------------------- the roster

    async def compare(self, now: Membership) -> None:
        """Engines that the roster misses or lists otherwise, and members that are no engines of
        ours."""
        seen, self._verdicts_seen = self._verdicts_seen, len(now.stalled_engines)
        fresh = (
            now.stalled_engines[seen:] if seen <= len(now.stalled_engines) else now.stalled_engines
        )
        reasons = {stalled.rank: stalled.reason for stalled in fresh}
        for rank, handle in list(self.engines.items()):
            assert handle.ready is not None
            member = now.view.roster.find(rank, handle.ready.incarnation)
            if handle.in_transition:
                continue
            if member is None:
                self.spawn(self.missed(handle, reasons.get(rank)))
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

        handle.exit_watcher = self.spawn(watch())

    async def missed(self, handle: EngineHandle, reason: str | None) -> None:
        """The roster is without it. `reason`: it was found to have stopped. Else the coordinator
        does not know it, and if it answers, it joins again."""
        if reason is None:
            handle.in_transition = True
            try:
                await self._placement.refresh(handle)
                async with self.group_change_lock:
                    await self._coordinator.join([handle.member])
                return
            except Exception as error:
                reason = f"it is not in the roster, and cannot be: {type(error).__name__}: {error}"
            finally:
                handle.in_transition = False
        await self._on_engine_dead(handle, reason, stopped_s=self._config.stall_timeout_s)

    async def _on_engine_dead(
        self, handle: EngineHandle, reason: str, stopped_s: float = 0.0
    ) -> None:
        """An engine is dead, or as good as dead for `stopped_s`: it leaves the roster, and what
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
            finally:  # what could not be ended must not count for an engine for ever
                del self.ending[rank]
                self._on_change()

    async def refresh(self, reports: list[EngineReport]) -> None:
        """Ask those who have replaced workers which ones they have."""
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
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _task: work.close())  # cancelled before it began
        return task

    async def rest(self) -> None:
        """Cancel everything that runs, the caller aside."""
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
