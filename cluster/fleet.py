"""The engines of a cluster: how they come, go, die and are missed. What is wanted, others decide.

Ranks move from `starting` to `engines` when they have joined, and leave through `ending`, where
they stay until their names and resources are free again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from swell.cluster.coordinator_handle import CoordinatorHandle
from swell.cluster.placement import EngineHandle, Placement
from swell.configs.log import FactLogger
from swell.configs.schema import ClusterConfig
from swell.coordinator.wire import EngineReport

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
        self.commits = asyncio.Lock()
        """Held while the engines' group changes: one change at a time."""
        self._config = config
        self._coordinator = coordinator
        self._placement = placement
        self._on_death, self._on_change = on_death, on_change
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = FactLogger("cluster.fleet")

    @property
    def staying(self) -> list[EngineHandle]:
        """Engines that serve and shall go on, by rank."""
        return [handle for _, handle in sorted(self.engines.items()) if not handle.leaving]

    @property
    def present(self) -> int:
        """Engines that count towards the target. One that has died counts until it can be
        replaced."""
        ending = sum(not handle.leaving for handle in self.ending.values())
        return len(self.staying) + len(self.starting) + ending

    @property
    def handles(self) -> list[EngineHandle]:
        """Everything that has to be ended some day."""
        return [*self.engines.values(), *self.starting.values(), *self.ending.values()]

    def free_ranks(self, count: int) -> list[int]:
        """The lowest ones."""
        taken = {*self.engines, *self.starting, *self.ending}
        return [rank for rank in range(count + len(taken)) if rank not in taken][:count]

    # ---------------------------------------------------------------- coming

    async def adopt(self) -> None:
        """Take over the engines that an earlier manager left."""
        for handle in await self._placement.adopt():
            self._enter(handle)
            self._watch(handle)

    async def grow(self, handles: list[EngineHandle]) -> dict[int, BaseException]:
        """Start newcomers, which are in `starting`, beside each other; those that are ready join
        in one epoch. Returns the others, and why."""
        results = await asyncio.gather(
            *(self._placement.start(handle) for handle in handles), return_exceptions=True
        )
        failures = {
            handle.rank: result
            for handle, result in zip(handles, results, strict=True)
            if isinstance(result, BaseException)
        }
        ready = [handle for handle in handles if handle.rank not in failures]
        try:
            if ready:
                await self._join(ready)
        except Exception as error:
            failures.update({handle.rank: error for handle in ready})
            await asyncio.gather(
                *(self._placement.kill(handle) for handle in ready), return_exceptions=True
            )
        for handle in handles:
            del self.starting[handle.rank]
        for handle in ready:
            if handle.rank not in failures:
                self._enter(handle)
        self._on_change()
        return failures

    async def _join(self, handles: list[EngineHandle]) -> None:
        """Raises if one of them dies meanwhile: it is lost, and its group does not form."""
        for handle in handles:
            self._watch(handle)
        async with self.commits:
            self._on_change()
            await self._coordinator.join([handle.member for handle in handles])

    def _enter(self, handle: EngineHandle) -> None:
        handle.joined_at = asyncio.get_running_loop().time()
        self.engines[handle.rank] = handle
        if handle.ended is not None:
            self.spawn(self._gone(handle, handle.ended))

    # ---------------------------------------------------------------- going

    async def shrink(self, going: list[EngineHandle], timeout_s: float) -> None:
        """Let engines finish what they have, for so long, and end them."""
        ranks = [handle.rank for handle in going]
        await self._coordinator.leave(ranks)
        await self.wait_idle(ranks, timeout_s)
        going = [handle for handle in going if self.engines.get(handle.rank) is handle]
        if not going:
            return  # they died meanwhile
        for handle in going:
            handle.moving = True
        async with self.commits:
            self._on_change()
            await self._coordinator.part([handle.rank for handle in going])
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

    # ---------------------------------------------------------------- dying

    def _watch(self, handle: EngineHandle) -> None:
        async def watch() -> None:
            handle.ended = await self._placement.ended(handle)
            await self._gone(handle, handle.ended)

        handle.watcher = self.spawn(watch())

    async def missed(self, handle: EngineHandle, reason: str | None) -> None:
        """The roster is without it. `reason`: it was found to have stopped. Else the coordinator
        does not know it, and if it answers, it joins again."""
        if reason is None:
            handle.moving = True
            try:
                await self._placement.refresh(handle)
                async with self.commits:
                    await self._coordinator.join([handle.member])
                return
            except Exception as error:
                reason = f"it is not in the roster, and cannot be: {type(error).__name__}: {error}"
            finally:
                handle.moving = False
        await self._gone(handle, reason, stopped_s=self._config.stall_timeout_s)

    async def _gone(self, handle: EngineHandle, reason: str, stopped_s: float = 0.0) -> None:
        """An engine is dead, or as good as dead for `stopped_s`: it leaves the roster, and what
        is left of it is ended."""
        rank = handle.rank
        if self.starting.get(rank) is handle:
            await self._coordinator.lose([rank])
        if self.engines.get(rank) is not handle:
            return
        self.ending[rank] = self.engines.pop(rank)
        lived_s = asyncio.get_running_loop().time() - handle.joined_at - stopped_s
        self._log.warning("engine died", rank=rank, reason=reason, lived_s=round(lived_s, 1))
        if not handle.leaving:
            self._on_death(rank, lived_s, reason)
        try:
            await self._coordinator.lose([rank])
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
        return task

    async def rest(self) -> None:
        """Cancel everything that runs, the caller aside."""
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
