"""Places engines and keeps as many as are wanted. The only one who changes the roster.

    target --- grow ---> starting --- join ---> active --- leave ---> leaving --- remove ---> gone
                            |                     |
                          failed                died: removed at once, and replaced

One task reconciles what is with what is wanted; requests to change only move the target. The
manager carries no traffic: while it is away, everything else goes on, and when Serve has
restarted it, it finds its engines by their names.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from swell.cluster.placement import EngineHandle, Placement, StartFailed
from swell.configs.log import FactLogger
from swell.configs.schema import Config
from swell.coordinator.coordinator import CoordinatorContact
from swell.coordinator.roster import MemberState

_MAX_FAILURES = 5
"""Starts that may fail in a row before the manager gives up and says so."""


class ScaleRefused(ValueError):
    """A change that cannot be begun now: the reason, in words."""

    def __init__(self, message: str, *, conflict: bool = False) -> None:
        super().__init__(message)
        self.conflict = conflict


class ClusterManager:
    """The lives of a cluster's engines. All methods run in one event loop."""

    def __init__(self, config: Config, placement: Placement) -> None:
        self.config = config
        self.target = config.parallel.data
        self.phase = "idle"
        self.error: str | None = None
        self._placement = placement
        self._engines: dict[int, EngineHandle] = {}
        self._starting: dict[int, EngineHandle] = {}
        self._failures = 0
        self._before = self.target
        """What the target was before the change under way."""
        self._asked = False
        """The change under way was asked for; else it replaces what died, or is the start."""
        self._drain_timeout_s = config.cluster.drain_timeout_s
        self._wake = asyncio.Event()
        self._log = FactLogger("cluster.manager")
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take over engines that an earlier manager left, and begin to reconcile."""
        await self._placement.open()
        for handle in await self._placement.adopt():
            self._engines[handle.rank] = handle
            self._watch(handle)
        if self._engines:
            staying = sum(not handle.leaving for handle in self._engines.values())
            self.target = max(staying, self.config.cluster.min_engines)
        self._task = asyncio.create_task(self._reconcile_forever())

    async def stop(self) -> None:
        """Let the engines finish what they have, then end them and the coordinator.

        Serve stops the ingresses at the same time: they take nothing new and finish their streams.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self._wait_idle(list(self._engines), self.config.cluster.drain_timeout_s)
        except Exception as error:  # whatever cannot be asked is ended all the same
            self._log.warning("not drained", error=f"{type(error).__name__}: {error}")
        await self._placement.close([*self._engines.values(), *self._starting.values()])
        self._engines.clear()

    @property
    def contact(self) -> CoordinatorContact | None:
        return self._placement.contact

    # ---------------------------------------------------------------- what people ask

    def scale(self, engines: int, drain_timeout_s: float | None = None) -> None:
        """Set how many engines are wanted. Raises ScaleRefused; the state is then unchanged."""
        low, high = self.config.cluster.min_engines, self.config.cluster.max_engines
        if not low <= engines <= high:
            raise ScaleRefused(
                f"engines={engines} lies outside of cluster.min_engines={low} .. "
                f"cluster.max_engines={high}"
            )
        if self.phase not in ("idle", "failed"):
            raise ScaleRefused(
                f"a change to {self.target} engines is in phase {self.phase!r}; "
                "wait until it is idle",
                conflict=True,
            )
        self._before = self.target
        self.target = engines
        self._asked = True
        self.error = None
        self._failures = 0
        self._drain_timeout_s = (
            self.config.cluster.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        )
        now = len(self._engines)
        self.phase = "prepare" if engines > now else "drain" if engines < now else "idle"
        self._wake.set()

    def drain(self, rank: int) -> None:
        """Take one engine out; the target falls with it."""
        if rank not in self._engines:
            raise ScaleRefused(f"there is no engine {rank}; engines: {sorted(self._engines)}")
        self.scale(len(self._engines) - 1)
        self._engines[rank].leaving = True

    async def describe(self) -> dict[str, Any]:
        """The body of `GET /admin/cluster`."""
        view = await self._placement.view()
        reports = {report.rank: report for report in view.reports}
        states = {member.rank: member.state for member in view.roster.members}
        engines = []
        for rank, handle in sorted({**self._starting, **self._engines}.items()):
            report = reports.get(rank)
            engines.append(
                {
                    "rank": rank,
                    "state": str(states.get(rank, "starting")),
                    "pid": handle.ready.pid if handle.ready else None,
                    "node": handle.ready.node if handle.ready else None,
                    "running": report.running if report else 0,
                    "waiting": report.waiting if report else 0,
                    "kv_usage": report.kv_usage if report else 0.0,
                    "steps": report.steps if report else 0,
                    "workers": msgspec.to_builtins(handle.ready.workers) if handle.ready else [],
                }
            )
        return {
            "epoch": view.roster.epoch,
            "wave": view.wave,
            "state": self._state(states),
            "target": self.target,
            "engines": engines,
            "coordinator": {"pid": self._placement.coordinator_pid},
            "rescale": {"phase": self.phase, "error": self.error},
        }

    async def waiting_for(self) -> tuple[str, bool]:
        """One line for people who wait for the cluster, and whether they wait in vain."""
        if self.phase == "failed":
            return self.error or "the cluster did not start", True
        starting = sorted(self._starting.items())
        doing = await asyncio.gather(*(handle.doing() for _rank, handle in starting))
        lines = [f"engine {rank}: {text}" for (rank, _), text in zip(starting, doing, strict=True)]
        return "; ".join(lines) or self.error or "the first engine", False

    def _state(self, states: dict[int, MemberState]) -> str:
        if not any(state is MemberState.ACTIVE for state in states.values()):
            return "failed" if self.phase == "failed" else "starting"
        return "serving" if len(states) == self.target else "changing"

    # ---------------------------------------------------------------- reconciling

    async def _reconcile_forever(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._reconcile()
            except Exception as error:
                self._log.error("reconcile failed", error=f"{type(error).__name__}: {error}")
                self._fail(f"{type(error).__name__}: {error}")
            await self._wake.wait()

    async def _reconcile(self) -> None:
        while len(self._engines) < self.target and self._failures < _MAX_FAILURES:
            self.phase = "prepare"
            await self._grow(self.target - len(self._engines))
        if len(self._engines) > self.target:
            self.phase = "drain"
            await self._shrink(len(self._engines) - self.target)
        self._asked = False
        if self.phase != "failed":
            self.phase, self.error = "idle", None

    async def _grow(self, count: int) -> None:
        """Start newcomers beside each other; those that are ready join in one epoch."""
        ranks = [r for r in range(count + len(self._engines)) if r not in self._engines][:count]
        handles = [self._placement.plan(rank) for rank in ranks]
        self._starting = {handle.rank: handle for handle in handles}
        results = await asyncio.gather(
            *(self._placement.start(handle) for handle in handles), return_exceptions=True
        )
        ready = [h for h, result in zip(handles, results, strict=True) if result is None]
        try:
            if ready:
                self.phase = "commit"
                await self._placement.join([handle.member for handle in ready])
                self._failures = 0
        except BaseException:
            await asyncio.gather(*(self._placement.end(handle) for handle in ready))
            raise
        finally:
            self._starting = {}
        for handle in ready:
            self._engines[handle.rank] = handle
            self._watch(handle)
        low = self.config.cluster.min_engines
        for failure in (r for r in results if isinstance(r, BaseException)):
            self._log.error("engine did not start", error=str(failure))
            self._failures += 1
            self.error = str(failure)
            if (isinstance(failure, StartFailed) and failure.permanent) or self._asked:
                # Nothing to gain by trying again, or somebody waits to hear: the change is called
                # off, and the old epoch goes on.
                self._failures = _MAX_FAILURES
                self.target = max(len(self._engines), self._before if self._asked else low)
        if self._failures >= _MAX_FAILURES:
            self.phase = "failed"
        elif self._failures:
            await asyncio.sleep(min(0.5 * 2**self._failures, 10))

    async def _shrink(self, count: int) -> None:
        """The marked ones first, then the highest ranks."""
        order = sorted(self._engines.values(), key=lambda h: (not h.leaving, -h.rank))
        going = order[:count]
        ranks = [handle.rank for handle in going]
        await self._placement.leave(ranks)
        await self._wait_idle(ranks, self._drain_timeout_s)
        for handle in going:
            self._engines.pop(handle.rank, None)  # it may have died meanwhile
        await self._placement.remove(ranks)
        await asyncio.gather(*(self._placement.end(handle) for handle in going))

    async def _wait_idle(self, ranks: list[int], timeout_s: float) -> None:
        """Until the engines have nothing left, or the time is over.

        Two quiet looks in a row, a report apart: a request may be on its way when the first is
        taken.
        """
        deadline = time.monotonic() + timeout_s
        quiet = 0
        while quiet < 2 and time.monotonic() < deadline:
            await asyncio.sleep(2 * self.config.cluster.load_report_s)
            view = await self._placement.view()
            busy = [r for r in view.reports if r.rank in ranks and r.running + r.waiting]
            quiet = 0 if busy else quiet + 1

    def _watch(self, handle: EngineHandle) -> None:
        async def watch() -> None:
            reason = await self._placement.ended(handle)
            if self._engines.get(handle.rank) is not handle:
                return
            self._log.warning("engine died", rank=handle.rank, reason=reason)
            del self._engines[handle.rank]
            self._failures = 0
            try:
                await self._placement.remove([handle.rank])
                await self._placement.end(handle)
            finally:
                self._wake.set()

        handle.watcher = asyncio.create_task(watch())

    def _fail(self, message: str) -> None:
        self.error = message
        self.phase = "failed"
