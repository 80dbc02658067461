"""Engines that leave finish what they have first, for a limited time. No decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from swell.cluster.control.coordinator_handle import CoordinatorHandle
from swell.cluster.control.engine_handle import EngineHandle
from swell.cluster.control.fleet_view import Intent
from swell.configs.log import StructuredLogger
from swell.configs.schema import MAX_DRAIN_S

_IDLE_POLLS = 2
"""A request may be on its way when the first is taken."""


class Drain:
    """Runs in the fleet's event loop. `engines`: those that serve, by rank. `detach` takes engines
    out of the roster and ends them."""

    def __init__(
        self,
        load_report_s: float,
        coordinator: CoordinatorHandle,
        engines: Mapping[int, EngineHandle],
        detach: Callable[[list[EngineHandle]], Awaitable[None]],
    ) -> None:
        self._load_report_s, self._coordinator = load_report_s, coordinator
        self._engines, self._detach = engines, detach
        self.held: Mapping[int, bool] = {}
        """Ranks whose answers could continue on no other engine, and whether some would have to: no
        drain time ends these. Replaced whole."""
        self._log = StructuredLogger("cluster.drain")

    @property
    def leaving(self) -> list[EngineHandle]:
        """By rank."""
        return [handle for _, handle in sorted(self._engines.items()) if handle.leaving]

    def add(self, handle: EngineHandle, timeout_s: float, intent: Intent) -> None:
        """It may finish what it has, for so long once it gets no more requests."""
        handle.intent, handle.idle_polls = intent, 0
        handle.left_at = _now()
        handle.leave_deadline_s = handle.left_at + timeout_s

    def shorten(self, timeout_s: float) -> None:
        """Engines that leave have no longer than this from now on, unless they were named."""
        latest = _now() + timeout_s
        for handle in [each for each in self.leaving if each.intent is Intent.LEAVE]:
            handle.leave_deadline_s = min(handle.leave_deadline_s, latest)

    async def run(self) -> None:
        """Until no engine is leaving: each is detached when it has finished what it has, or when
        its time is over. A paused engine cannot finish, and is detached then."""
        marked: set[str] = set()
        while self.leaving:
            leaving = [handle for handle in self.leaving if not handle.in_transition]
            marked &= {handle.name for handle in leaving}
            if fresh := [handle for handle in leaving if handle.name not in marked]:
                marked |= {handle.name for handle in fresh}
                await self._mark(fresh)
            now = _now()
            due = [handle for handle in leaving if self._is_due(handle, now)]
            if due:
                await self._detach(due)
            else:
                await self._poll(leaving)

    def _is_due(self, handle: EngineHandle, now: float) -> bool:
        is_idle = handle.idle_polls >= _IDLE_POLLS
        is_needed = self.held.get(handle.rank)
        if is_needed is None:
            return is_idle or now >= handle.leave_deadline_s
        return (is_idle and not is_needed) or now >= handle.left_at + MAX_DRAIN_S

    async def _mark(self, handles: list[EngineHandle]) -> None:
        """They get no more requests. The time until then is none of theirs."""
        epoch = await self._coordinator.leave([handle.rank for handle in handles])
        for handle in handles:
            handle.left_epoch = epoch
            handle.leave_deadline_s += _now() - handle.left_at

    async def _poll(self, handles: list[EngineHandle]) -> None:
        """Look at a later report of each."""
        await asyncio.sleep(2 * self._load_report_s)
        reports = {report.rank: report for report in (await self._coordinator.view()).reports}
        for handle in handles:
            handle.on_poll(reports.get(handle.rank))

    async def wait_idle(self, timeout_s: float) -> None:
        """Until no engine has requests left, or the time is over."""
        for handle in (handles := list(self._engines.values())):
            handle.idle_polls = 0
        try:
            async with asyncio.timeout(timeout_s):
                while any(handle.idle_polls < _IDLE_POLLS for handle in handles):
                    await self._poll(handles)
        except TimeoutError:
            self._log.info("not drained", ranks=[h.rank for h in handles], timeout_s=timeout_s)


def _now() -> float:
    return asyncio.get_running_loop().time()
