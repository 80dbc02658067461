"""Drains leaving engines: they finish their requests first, for a limited time. No decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from swell.cluster.control.engines.engine_handle import EngineHandle
from swell.cluster.control.plan.checkpoint import DrainRecord
from swell.cluster.control.plan.fleet_view import Intent
from swell.cluster.control.ray.coordinator_handle import CoordinatorHandle
from swell.configs.runtime.log import StructuredLogger
from swell.configs.schema import MAX_DRAIN_S
from swell.coordinator.roster import MemberState
from swell.coordinator.transport.runtime import Runtime

_IDLE_POLLS = 2
"""Polls in a row that must find an engine idle: at the first one a request may still be in
flight."""


@dataclass(frozen=True)
class Departure:
    """Engines that may leave the roster now."""

    handles: Sequence[EngineHandle] = ()
    idle_epoch: int | None = None
    """The epoch of the roster under which they were idle, and which it must still have; None: their
    drain time is over."""


Detach = Callable[[Callable[[], Departure]], Awaitable[None]]
"""Takes engines out of the roster and terminates them. It waits for other changes of the group, and
determines the engines afterwards: meanwhile they may be kept, or get more time."""


class Drain:
    """Drains the leaving engines of one fleet, in its event loop. `engines`: serving engines by
    rank; `on_change`: called when the records change during a drain."""

    def __init__(
        self,
        load_report_s: float,
        coordinator: CoordinatorHandle,
        runtime: Runtime,
        engines: Mapping[int, EngineHandle],
        detach: Detach,
        on_change: Callable[[], None],
    ) -> None:
        self._load_report_s, self._coordinator, self._runtime = load_report_s, coordinator, runtime
        self._engines, self._detach, self._on_change = engines, detach, on_change
        self._held: Mapping[int, bool] = {}
        self._departing: Sequence[EngineHandle] = ()
        """The engines that are being detached. That cannot be undone, so they get no more time."""
        self._log = StructuredLogger("cluster.drain")

    @property
    def leaving(self) -> list[EngineHandle]:
        """Handles of the leaving engines, in order of rank."""
        return [handle for _, handle in sorted(self._engines.items()) if handle.leaving]

    @property
    def unmarked(self) -> list[EngineHandle]:
        """Handles of leaving engines that the coordinator may still list as active."""
        return [each for each in self.leaving if not (each.is_marked or each.in_transition)]

    def hold(self, held: Mapping[int, bool]) -> None:
        """Sets the leaving engines that are the last ones of their version: rank -> whether
        unfinished responses need that version. Only `MAX_DRAIN_S` limits their drain, not the
        requested drain time. An idle engine stays as long as its version is needed."""
        self._held = held

    def add(self, handle: EngineHandle, timeout_s: float, intent: Intent) -> None:
        """Lets an engine leave. Its drain time starts once it gets no new requests. If it is
        already leaving, its drain time starts again."""
        if not handle.leaving:
            handle.left_at = _now()
        handle.intent, handle.idle_polls = intent, 0
        self._begin(handle, timeout_s)

    def set_time(self, timeout_s: float) -> None:
        """Restarts the drain time of engines with `Intent.LEAVE`, with this length."""
        for handle in [each for each in self.leaving if each.intent is Intent.LEAVE]:
            self._begin(handle, timeout_s)

    def resume(self, handle: EngineHandle, record: DrainRecord) -> None:
        """Continues a drain that an earlier manager started, with the remaining time."""
        now, passed = _now(), self._runtime.unix_time() - record.left_at
        if handle.next_version is not None:
            handle.intent = Intent.RELOAD
        else:
            handle.intent = Intent.DRAIN if record.is_named else Intent.LEAVE
        handle.left_at = now - min(max(0.0, passed), MAX_DRAIN_S)
        left_s = record.unmarked_s or record.deadline - self._runtime.unix_time()
        self._begin(handle, min(max(0.0, left_s), MAX_DRAIN_S))

    def _begin(self, handle: EngineHandle, timeout_s: float) -> None:
        if handle in self._departing:
            self._set_deadline(handle, handle.leave_deadline_s)
            return
        handle.unmarked_since = _now()
        handle.is_marked = False
        self._set_deadline(handle, handle.unmarked_since + timeout_s)

    def _set_deadline(self, handle: EngineHandle, deadline_s: float) -> None:
        handle.leave_deadline_s = deadline_s
        since_1970_s = self._runtime.unix_time() - _now()
        handle.drain = DrainRecord(
            handle.name,
            since_1970_s + handle.left_at,
            since_1970_s + deadline_s,
            handle.intent is Intent.DRAIN,
            "" if handle.next_version is None else handle.next_version.name,
            0.0 if handle.is_marked else max(0.0, deadline_s - handle.unmarked_since),
        )

    async def mark(self) -> None:
        """Marks the leaving engines. This runs concurrently with `run`, which waits while the group
        changes: for long if an engine hangs. Meanwhile other engines may have to leave, too."""
        while fresh := self.unmarked:
            await self._mark(fresh)

    async def run(self) -> None:
        """Drains until no engine is leaving: each marked one is detached when it has finished its
        requests, or at its deadline. A paused engine cannot finish, and is detached at its
        deadline."""
        while self.leaving:
            leaving = [handle for handle in self.leaving if not handle.in_transition]
            if self._departure(leaving).handles:
                try:
                    await self._detach(self._depart)
                finally:
                    self._departing = ()
                for handle in self.leaving:  # engines that remain must be found idle again
                    handle.idle_polls = 0
            else:
                await self._poll(leaving, is_leaving=True)

    def _depart(self) -> Departure:
        departure = self._departure(self.leaving)
        self._departing = departure.handles
        return departure

    def _departure(self, leaving: list[EngineHandle]) -> Departure:
        """Returns those of the leaving engines whose drain time is over, or else the idle ones."""
        now, marked = _now(), [handle for handle in leaving if handle.is_marked]
        if late := [handle for handle in marked if self._is_late(handle, now)]:
            return Departure(late)
        if idle := [handle for handle in marked if self._is_idle(handle)]:
            return Departure(idle, min(handle.idle_epoch for handle in idle))
        return Departure()

    def _is_late(self, handle: EngineHandle, now: float) -> bool:
        if handle.rank in self._held:
            return now >= handle.left_at + MAX_DRAIN_S
        return now >= handle.leave_deadline_s

    def _is_idle(self, handle: EngineHandle) -> bool:
        return handle.idle_polls >= _IDLE_POLLS and not self._held.get(handle.rank)

    async def _mark(self, handles: list[EngineHandle]) -> None:
        """Tells the coordinator that these engines get no more requests. The time until then does
        not count as drain time. An engine that is kept meanwhile, or told to leave again, is marked
        later."""
        begun = {handle.name: handle.unmarked_since for handle in handles}
        epoch = await self._coordinator.leave([handle.rank for handle in handles])
        for handle in handles:
            if handle.leaving and handle.unmarked_since == begun[handle.name]:
                handle.is_marked, handle.left_epoch, handle.idle_polls = True, epoch, 0
                delay_s = _now() - handle.unmarked_since
                self._set_deadline(handle, handle.leave_deadline_s + delay_s)
        self._on_change()

    async def _poll(self, handles: list[EngineHandle], *, is_leaving: bool = False) -> None:
        """Reads a later report of each engine. With `is_leaving` the report counts only if the
        roster lists the engine as leaving, so that ingresses send new requests to others."""
        await asyncio.sleep(2 * self._load_report_s)
        view = await self._coordinator.view()
        reports, roster = {report.rank: report for report in view.reports.engines}, view.roster
        for handle in handles:
            member = handle.find_in(roster)
            counts = not is_leaving or (member and member.state is MemberState.LEAVING)
            handle.on_poll(reports.get(handle.rank) if counts else None, roster.epoch)

    async def wait_idle(self, timeout_s: float) -> None:
        """Waits until no engine has requests left, or until the timeout."""
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
