"""Keeps as many engines as are wanted. The only one who changes the roster on purpose.

    target --- grow ---> starting --- join ---> serving --- leave ---> leaving --- part ---> gone
                            |                    |   ^                   |
                    failed or called off         |   +------- keep ------+
                                          died, or found to have stopped: lost at once, replaced

One task compares what is with what is wanted and begins what is missing; starts and drains run
beside it and beside each other, so that a slow one holds up nobody. Another follows the roster,
from which the coordinator takes whoever has stopped. Requests to change only move the target, and
the newest one counts, whatever is under way. Nothing is given up: what fails is tried again, ever
more slowly, and `describe` says so.

The manager carries no traffic: while it is away, everything else goes on. What it wants is noted
(`notes.py`), where its successor finds it; the responses that it keeps for ingresses are lost
with it. There may be two for a moment, when Serve replaces one that was stopped: the one that took
over last rules, the other leaves all to it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from swell.cluster.control.backoff import Backoff, Trouble
from swell.cluster.control.checkpoint_store import CheckpointStore, ClusterCheckpoint
from swell.cluster.control.checkpoint_writer import CheckpointWriter
from swell.cluster.control.cluster_status import describe
from swell.cluster.control.coordinator_handle import CoordinatorHandle
from swell.cluster.control.fleet import Fleet
from swell.cluster.control.placement import EngineHandle, Placement, StartFailed
from swell.configs.log import StructuredLogger
from swell.configs.process import exit_on_error_async
from swell.configs.schema import Config
from swell.coordinator.roster import Roster
from swell.coordinator.service import ManagerState, Membership
from swell.coordinator.wire import ClusterView

_LOOK_S = 2.0
"""How long a description waits for the coordinator before it tells what was known last."""
_PAUSE_S = 1.0
"""After something failed that is tried again."""


class ScaleRefused(ValueError):
    """A change that cannot be made: the reason, in words."""


class ClusterManager:
    """The lives of a cluster's engines. All methods run in one event loop."""

    def __init__(
        self,
        config: Config,
        coordinator: CoordinatorHandle,
        placement: Placement,
        notes: CheckpointStore,
    ) -> None:
        self.config = config
        self.target = config.parallel.data
        self.pause_requested = False
        """An operator wants a pause."""
        self._is_leader = False
        self._coordinator = coordinator
        self._placement = placement
        self._notes = CheckpointWriter(notes, config.parallel.data)
        self._lifecycle_lock = asyncio.Lock()
        """Held while it starts, and while it stops."""
        self._wake = asyncio.Event()
        self._fleet = Fleet(
            config.cluster,
            coordinator,
            placement,
            on_death=self._on_death,
            on_change=self._wake.set,
        )
        self._backoff = Backoff()
        self._failure: str | None = None
        """Why the last change that was asked for failed; the target is then what it was before."""
        self._served = False
        """The cluster was up once: what fails from then on is tried for ever."""
        self._previous_target = self.target
        """What the target was before the change that was asked for."""
        self._drain_timeout_s = config.cluster.drain_timeout_s
        self._scale_requested = False
        """The next start was asked for; else it replaces what died, or is the first."""
        self._view = ClusterView(Roster())
        self._log = StructuredLogger("cluster.manager")

    async def start(self) -> None:
        """Take over what an earlier manager left, and begin to reconcile."""
        async with self._lifecycle_lock:
            await self._coordinator.open()
            kept = await self._notes.before()
            note = await self._coordinator.take_over(self._notes.owner)
            self._is_leader = True
            self._view = await self._coordinator.view()
            self.pause_requested = (
                kept.pause_requested
                if kept.target
                else note.pause_requested or self._view.state == "paused"
            )
            low, high = self.config.cluster.min_engines, self.config.cluster.max_engines
            self.target = min(max(low, kept.target or note.target or self.target), high)
            self._previous_target = self.target
            self._served = kept.served
            await self.save()
            newcomers = await self._fleet.adopt()
            if not (kept.target or note.target):
                self.target = min(max(self.target, len(self._fleet.staying)), high)
            if newcomers:
                self._fleet.spawn(self._grow(newcomers, asked=False))
            self._fleet.spawn(exit_on_error_async(self._reconcile_forever, "manager: reconcile"))
            self._fleet.spawn(
                exit_on_error_async(self._watch_membership_forever, "manager: follow")
            )

    async def leave(self) -> None:
        """Do nothing more: a successor takes over."""
        await self._fleet.rest()

    async def stop(self) -> None:
        """Let the engines finish what they have, then end them and the coordinator; unless
        another manager has taken over. What `start` is just taking over is ended, too.

        Serve stops the ingresses at the same time: they take nothing new and finish their streams.
        """
        async with self._lifecycle_lock:
            await self._fleet.rest()
            if not (self._is_leader and await self._notes.rules()):
                return
            try:
                await self._fleet.wait_idle(
                    list(self._fleet.engines), self.config.cluster.drain_timeout_s
                )
            except Exception as error:  # whatever cannot be asked is ended all the same
                self._log.warning("not drained", error=f"{type(error).__name__}: {error}")
            if not await self._notes.rules():
                return
            await self._placement.close(self._fleet.handles)
            await self._coordinator.close()
            await self._notes.clear()

    @property
    def phase(self) -> str:
        """Of the change of engines: idle, prepare, commit, drain or failed. It is failed while
        nothing happens before the next attempt, too."""
        fleet = self._fleet
        if fleet.group_change_lock.locked():
            return "commit"
        if fleet.coming:
            return "prepare"
        if fleet.going:
            return "drain"
        trouble = self.trouble
        if self._failure is not None or (trouble is not None and trouble.exhausted):
            return "failed"
        staying = len(fleet.staying)
        if staying == self.target:
            return "idle"
        return "prepare" if staying < self.target else "drain"

    @property
    def trouble(self) -> Trouble | None:
        """What keeps engines that are missing from being there."""
        if len(self._fleet.staying) >= self.target:
            return None
        return self._backoff.trouble(self._fleet.engines, asyncio.get_running_loop().time())

    @property
    def error(self) -> str | None:
        """What went wrong last, while it still matters."""
        trouble = self.trouble
        return self._failure or (None if trouble is None else str(trouble))

    # ---------------------------------------------------------------- what people ask

    def scale(self, engines: int, drain_timeout_s: float | None = None) -> None:
        """Set how many engines are wanted; this replaces a change that is under way. Raises
        ScaleRefused; the state is then unchanged."""
        low, high = self.config.cluster.min_engines, self.config.cluster.max_engines
        if not low <= engines <= high:
            raise ScaleRefused(
                f"engines={engines} lies outside of cluster.min_engines={low} .. "
                f"cluster.max_engines={high}"
            )
        grows = engines > len(self._fleet.staying)
        if grows and (reason := self._placement.refusal(engines)) is not None:
            raise ScaleRefused(reason)
        changing = self.phase not in ("idle", "failed")
        self._previous_target = min(self._previous_target, engines) if changing else self.target
        self.target = engines
        self._scale_requested, self._failure = True, None
        self._backoff.forget()
        self._drain_timeout_s = (
            self.config.cluster.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        )
        self._fleet.shorten_drain(self._drain_timeout_s)
        self._adjust()
        self._wake.set()

    def drain(self, rank: int) -> None:
        """Take one engine out; the target falls with it."""
        staying = [handle.rank for handle in self._fleet.staying]
        if rank not in staying:
            raise ScaleRefused(f"there is no engine {rank}; engines: {staying}")
        handle = self._fleet.engines[rank]
        handle.leaving = handle.drained = True  # it counts no more
        try:
            self.scale(self.target - 1)
        except ScaleRefused:
            handle.leaving = handle.drained = False
            raise
        self._fleet.leave(handle, self._drain_timeout_s)

    async def pause(self) -> None:
        """Let all engines keep their requests and compute nothing. A change that is under way goes
        on: newcomers are paused as they join, and who leaves hands over what it has."""
        self.pause_requested = True
        self._wake.set()
        await self._coordinator.pause()

    async def resume(self) -> None:
        self.pause_requested = False
        self._wake.set()
        await self._coordinator.resume()

    async def save(self) -> None:
        """Returns when what was asked last outlives this manager. Raises ScaleRefused if another
        one has taken over: it will not happen."""
        if not await self._notes.save(self._checkpoint()):
            raise ScaleRefused("another manager has taken over meanwhile: ask again")

    def _checkpoint(self) -> ClusterCheckpoint:
        return self._notes.note(self.target, self.pause_requested, self._served)

    async def describe(self) -> dict[str, Any]:
        """The body of `GET /admin/cluster`."""
        try:
            self._view = await asyncio.wait_for(self._coordinator.view(), _LOOK_S)
        except Exception as error:  # it is stopped, or was lost for good and is made anew
            self._log.warning("the coordinator does not answer", error=type(error).__name__)
        await self._fleet.refresh(self._view.reports)
        return describe(
            self._view,
            {**self._fleet.starting, **self._fleet.engines},
            coordinator_pid=self._coordinator.pid,
            target=self.target,
            phase=self.phase,
            error=self.error,
            trouble=self.trouble,
        )

    async def not_ready_reason(self) -> tuple[str, bool]:
        """One line for people who wait for the cluster, and whether the first start was in vain:
        it is tried again all the same, for those who have patience."""
        trouble = self.trouble
        if trouble is not None and trouble.exhausted and not self._served:
            return trouble.reason, True
        starting = sorted(self._fleet.starting.items())
        doing = await asyncio.gather(*(handle.doing() for _rank, handle in starting))
        lines = [f"engine {rank}: {text}" for (rank, _), text in zip(starting, doing, strict=True)]
        if self.error is not None:
            lines.append(self.error)
        return "; ".join(lines) or "the first engine", False

    # ---------------------------------------------------------------- what is wanted, what is

    async def _reconcile_forever(self) -> None:
        while self._is_leader:
            self._wake.clear()
            try:
                wait_s = self._reconcile()
            except Exception as error:  # what is wanted stays wanted
                self._log.error("cannot reconcile", error=f"{type(error).__name__}: {error}")
                wait_s = _PAUSE_S
            self._coordinator.note(self._note)
            self._fleet.spawn(self._notes.keep(self._checkpoint))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):  # `wait_for` may swallow `stop`
                    await self._wake.wait()

    def _reconcile(self) -> float | None:
        """Begin what is missing. Returns when to look again if nothing happens."""
        fleet, wait_s = self._fleet, None
        missing = self.target - fleet.present
        if missing > 0:
            wait_s = self._start(missing)
        else:
            self._scale_requested = False
        self._adjust()
        fleet.drain()
        return wait_s

    def _adjust(self) -> None:
        """Take back what is not wanted any more: a drain, a start that has not come to joining, and
        only then engines that serve."""
        fleet = self._fleet
        back = [
            h for h in fleet.leaving if self._scale_requested and not (h.drained or h.in_transition)
        ]
        for handle in back[: max(0, self.target - fleet.present)]:
            fleet.keep(handle)
        surplus = len(fleet.staying) + len(fleet.coming) - self.target
        for handle in reversed([h for h in fleet.coming if not h.in_transition]):
            if surplus > 0:
                fleet.cancel_start(handle)
                surplus -= 1
        if surplus > 0 and not fleet.coming:
            for handle in fleet.staying[-surplus:]:
                fleet.leave(handle, self._drain_timeout_s)

    def _start(self, count: int) -> float | None:
        """Start the lowest free ranks, of those that may be started now. Returns when the next
        one may be."""
        now = asyncio.get_running_loop().time()
        ranks = self._fleet.free_ranks(count)
        waits = {rank: self._backoff.wait_s(rank, now) for rank in ranks}
        due = [self._placement.plan(rank) for rank in ranks if not waits[rank]]
        if due:
            self._fleet.starting.update({handle.rank: handle for handle in due})
            self._fleet.spawn(self._grow(due, asked=self._scale_requested))
            self._scale_requested = False
        return min((wait_s for wait_s in waits.values() if wait_s), default=None)

    async def _grow(self, handles: list[EngineHandle], *, asked: bool) -> None:
        """What was asked for is over once it failed, and the old epoch goes on. What replaces is
        tried again, ever more slowly."""
        if not await self._notes.rules():
            await self._step_down()
            return
        failures = await self._fleet.grow(handles)
        for handle in handles:
            if handle.rank in self._fleet.engines:
                self._served = True
                self._backoff.started(handle.rank)
        now = asyncio.get_running_loop().time()
        for rank, failure in failures.items():
            self._log.error("engine did not start", rank=rank, error=str(failure))
            permanent = isinstance(failure, StartFailed) and failure.permanent
            self._backoff.failed(rank, now, str(failure), permanent=permanent)
        back = max(self._fleet.present, self._previous_target)
        if asked and failures and back < self.target:
            reason = next(reversed(failures.values()))
            told = f"{self.target} engines were not reached, the target is {back}: {reason}"
            self._log.error("change failed", error=told)
            self.target, self._failure = back, told
            self._backoff.forget()

    def _on_death(self, rank: int, lived_s: float, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        self._backoff.died(rank, lived_s, now, reason)
        if self._backoff.exhausted(rank):
            self._log.error("engines of one rank die again and again", rank=rank, reason=reason)

    # ---------------------------------------------------------------- what the coordinator says

    @property
    def _note(self) -> ManagerState:
        return ManagerState(self._notes.owner, self.target, self.pause_requested, self.phase)

    async def _watch_membership_forever(self) -> None:
        epoch = -1
        while self._is_leader:
            try:
                now = await self._coordinator.wait(epoch, 2 * self.config.cluster.heartbeat_s)
                epoch, self._view = now.view.roster.epoch, now.view
                await self._on_membership(now)
            except Exception as error:
                self._log.error("cannot follow", error=f"{type(error).__name__}: {error}")
                await asyncio.sleep(_PAUSE_S)
                await self._reopen_coordinator()

    async def _reopen_coordinator(self) -> None:
        """The coordinator was lost for good, if no other manager has taken over: one that does so
        with another configuration ends it."""
        if not await self._notes.rules():
            await self._step_down()
            return
        try:
            await self._coordinator.open()
        except Exception as error:
            self._log.error("no coordinator", error=f"{type(error).__name__}: {error}")

    async def _step_down(self) -> None:
        self._log.warning("another manager rules: this one does nothing more")
        self._is_leader = False
        await self._fleet.rest()

    async def _on_membership(self, now: Membership) -> None:
        """A coordinator that was restarted knows only what engines have told it."""
        if now.note.owner not in ("", self._notes.owner):
            await self._step_down()
            return
        if now.note != self._note:
            self._coordinator.note(self._note)
        if self.pause_requested and now.view.state == "serving":
            await self._coordinator.pause()
        if not self.pause_requested and now.view.state == "paused":
            await self._coordinator.resume()
        await self._fleet.compare(now)
