"""Keeps as many engines as are wanted. The only one who changes the roster on purpose.

    target --- grow ---> starting --- join ---> serving --- leave ---> leaving --- part ---> gone
                            |                      |
                          failed          died, or found to have stopped: lost at once, replaced

One task compares what is with what is wanted and begins what is missing; starts and drains run
beside it and beside each other, so that a slow one holds up nobody. Another follows the roster,
from which the coordinator takes whoever has stopped. Requests to change only move the target.

The manager carries no traffic: while it is away, everything else goes on. What it wants is noted
at the coordinator, where its successor finds it; the responses that it keeps for ingresses are lost
with it. There may be two for a moment, when Serve replaces one that was stopped: the one that took
over last rules, the other leaves all to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from typing import Any

from swell.cluster.backoff import Backoff
from swell.cluster.coordinator_handle import CoordinatorHandle
from swell.cluster.description import describe
from swell.cluster.fleet import Fleet
from swell.cluster.placement import EngineHandle, Placement, StartFailed
from swell.cluster.stored import StoredResponses, StoreReply, StoreWish
from swell.configs.log import FactLogger
from swell.configs.process import vital_task
from swell.configs.schema import Config
from swell.coordinator.coordinator import CoordinatorContact
from swell.coordinator.roster import MemberState, Roster
from swell.coordinator.service import ManagerNote, Membership
from swell.coordinator.wire import ClusterView

_LOOK_S = 2.0
"""How long a description waits for the coordinator before it tells what was known last."""
_PAUSE_S = 1.0
"""After something failed that is tried again."""


class ScaleRefused(ValueError):
    """A change that cannot be begun now: the reason, in words."""

    def __init__(self, message: str, *, conflict: bool = False) -> None:
        super().__init__(message)
        self.conflict = conflict


class ClusterManager:
    """The lives of a cluster's engines. All methods run in one event loop."""

    def __init__(
        self, config: Config, coordinator: CoordinatorHandle, placement: Placement
    ) -> None:
        self.config = config
        self.target = config.parallel.data
        self.held = False
        """An operator wants a pause."""
        self.error: str | None = None
        self._owner = secrets.token_hex(8)
        self._rules = False
        self._coordinator = coordinator
        self._placement = placement
        self._wake = asyncio.Event()
        self._fleet = Fleet(
            config.cluster,
            coordinator,
            placement,
            on_death=self._on_death,
            on_change=self._wake.set,
        )
        self._draining = False
        self._backoff = Backoff()
        self._failed = False
        """The last change that was asked for failed, or nothing is started any more."""
        self._resigned = False
        """Nothing is started any more until somebody asks."""
        self._before = self.target
        """What the target was before the change that was asked for."""
        self._asked = False
        """The next start was asked for; else it replaces what died, or is the first."""
        self._drain_timeout_s = config.cluster.drain_timeout_s
        self._view = ClusterView(Roster())
        self._verdicts_seen = 0
        self._stored = StoredResponses(
            config.serve.stored_responses,
            config.serve.stored_response_bytes,
            config.serve.stored_response_age_s,
        )
        self._log = FactLogger("cluster.manager")

    async def start(self) -> None:
        """Take over what an earlier manager left, and begin to reconcile."""
        await self._coordinator.open()
        note = await self._coordinator.take_over(self._owner)
        self._rules = True
        await self._fleet.adopt()
        self._view = await self._coordinator.view()
        self.held = note.held or self._view.state == "paused"
        if note.target:
            self.target = note.target
        elif self._fleet.engines:
            self.target = max(len(self._fleet.staying), self.config.cluster.min_engines)
        self._fleet.spawn(vital_task(self._reconcile_forever(), "manager: reconcile"))
        self._fleet.spawn(vital_task(self._follow_forever(), "manager: follow"))

    async def stop(self) -> None:
        """Let the engines finish what they have, then end them and the coordinator; unless
        another manager has taken over.

        Serve stops the ingresses at the same time: they take nothing new and finish their streams.
        """
        await self._fleet.rest()
        if not await self._still_rules():
            return
        try:
            await self._fleet.wait_idle(
                list(self._fleet.engines), self.config.cluster.drain_timeout_s
            )
        except Exception as error:  # whatever cannot be asked is ended all the same
            self._log.warning("not drained", error=f"{type(error).__name__}: {error}")
        await self._placement.close(self._fleet.handles)
        await self._coordinator.close()

    async def _still_rules(self) -> bool:
        if not self._rules:
            return False
        try:
            now = await asyncio.wait_for(self._coordinator.wait(-1, 0.0), _LOOK_S)
        except Exception:  # it does not answer, so nobody can have taken over
            return True
        return now.note.owner in ("", self._owner)

    @property
    def contact(self) -> CoordinatorContact | None:
        return self._coordinator.contact

    @property
    def phase(self) -> str:
        """Of the change of engines: idle, prepare, commit, drain or failed."""
        fleet = self._fleet
        if fleet.commits.locked():
            return "commit"
        if fleet.starting:
            return "prepare"
        if self._draining:
            return "drain"
        if self._failed:
            return "failed"
        staying = len(fleet.staying)
        if staying < self.target:
            return "prepare"
        return "drain" if staying > self.target or staying < len(fleet.engines) else "idle"

    # ---------------------------------------------------------------- what people ask

    def scale(self, engines: int, drain_timeout_s: float | None = None) -> None:
        """Set how many engines are wanted. Raises ScaleRefused; the state is then unchanged."""
        low, high = self.config.cluster.min_engines, self.config.cluster.max_engines
        if not low <= engines <= high:
            raise ScaleRefused(
                f"engines={engines} lies outside of cluster.min_engines={low} .. "
                f"cluster.max_engines={high}"
            )
        self._refuse_during_a_change()
        grows = engines > len(self._fleet.staying)
        if grows and (reason := self._placement.refusal(engines)) is not None:
            raise ScaleRefused(reason)
        self._before, self.target = self.target, engines
        self._asked, self._failed, self._resigned = True, False, False
        self.error = None
        self._backoff.forget()
        self._drain_timeout_s = (
            self.config.cluster.drain_timeout_s if drain_timeout_s is None else drain_timeout_s
        )
        self._wake.set()

    def drain(self, rank: int) -> None:
        """Take one engine out; the target falls with it."""
        staying = [handle.rank for handle in self._fleet.staying]
        if rank not in staying:
            raise ScaleRefused(f"there is no engine {rank}; engines: {staying}")
        self.scale(len(staying) - 1)
        self._fleet.engines[rank].leaving = True

    async def pause(self) -> None:
        """Let all engines keep their requests and compute nothing. Raises ScaleRefused during a
        change: engines that compute nothing cannot finish what they have."""
        self._refuse_during_a_change()
        self.held = True
        self._wake.set()
        await self._coordinator.hold()

    async def resume(self) -> None:
        self.held = False
        self._wake.set()
        await self._coordinator.release()

    async def describe(self) -> dict[str, Any]:
        """The body of `GET /admin/cluster`."""
        try:
            self._view = await asyncio.wait_for(self._coordinator.view(), _LOOK_S)
        except TimeoutError:
            self._log.warning("the coordinator does not answer")
        await self._fleet.refresh(self._view.reports)
        return describe(
            self._view,
            {**self._fleet.starting, **self._fleet.engines},
            coordinator_pid=self._coordinator.pid,
            target=self.target,
            phase=self.phase,
            error=self.error,
        )

    async def waiting_for(self) -> tuple[str, bool]:
        """One line for people who wait for the cluster, and whether they wait in vain."""
        if self.phase == "failed":
            return self.error or "the cluster did not start", True
        starting = sorted(self._fleet.starting.items())
        doing = await asyncio.gather(*(handle.doing() for _rank, handle in starting))
        lines = [f"engine {rank}: {text}" for (rank, _), text in zip(starting, doing, strict=True)]
        return "; ".join(lines) or self.error or "the first engine", False

    def stored(self, wish: StoreWish) -> StoreReply:
        """What ingresses keep here for each other, as long as this manager lives."""
        return self._stored.handle(wish, asyncio.get_running_loop().time())

    def _refuse_during_a_change(self) -> None:
        if self.phase not in ("idle", "failed"):
            raise ScaleRefused(
                f"a change to {self.target} engines is in phase {self.phase!r}; "
                "wait until it is idle",
                conflict=True,
            )

    # ---------------------------------------------------------------- what is wanted, what is

    async def _reconcile_forever(self) -> None:
        while self._rules:
            self._wake.clear()
            wait_s = self._reconcile()
            self._coordinator.note(self._note)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):  # `wait_for` may swallow `stop`
                    await self._wake.wait()

    def _reconcile(self) -> float | None:
        """Begin what is missing. Returns when to look again if nothing happens."""
        fleet, wait_s = self._fleet, None
        missing = self.target - fleet.present
        if missing > 0 and not self._resigned:
            wait_s = self._start(missing)
        else:
            self._asked = False
        if missing < 0 and not fleet.starting:
            for handle in fleet.staying[missing:]:
                handle.leaving = True
        going = [handle for handle in fleet.engines.values() if handle.leaving]
        if going and not self._draining:
            self._draining = True
            fleet.spawn(self._shrink(going))
        return wait_s

    def _start(self, count: int) -> float | None:
        """Start the lowest free ranks, of those that may be started now. Returns when the next
        one may be."""
        now = asyncio.get_running_loop().time()
        ranks = self._fleet.free_ranks(count)
        waits = {rank: self._backoff.wait_s(rank, now) for rank in ranks}
        due = [self._placement.plan(rank) for rank in ranks if not waits[rank]]
        if due:
            self._fleet.starting.update({handle.rank: handle for handle in due})
            self._fleet.spawn(self._grow(due, asked=self._asked))
            self._asked = False
        return min((wait_s for wait_s in waits.values() if wait_s), default=None)

    async def _grow(self, handles: list[EngineHandle], *, asked: bool) -> None:
        """What was asked for is over once it failed, and the old epoch goes on. What replaces is
        tried again, as long as there is hope."""
        failures = await self._fleet.grow(handles)
        for handle in handles:
            if handle.rank not in failures:
                self._backoff.started(handle.rank)
        if not failures:
            self.error = self.error if self._failed else None
            return
        now = asyncio.get_running_loop().time()
        for rank, failure in failures.items():
            self.error = str(failure)
            self._log.error("engine did not start", rank=rank, error=self.error)
            self._backoff.failed(rank, now)
        permanent = any(isinstance(f, StartFailed) and f.permanent for f in failures.values())
        if asked:
            self.target = max(self._fleet.present, self._before)
            self._failed = True
        elif permanent or any(self._backoff.exhausted(rank, now) for rank in failures):
            self._resign()

    async def _shrink(self, going: list[EngineHandle]) -> None:
        try:
            await self._fleet.shrink(going, self._drain_timeout_s)
        except Exception:
            await asyncio.sleep(_PAUSE_S)
            raise
        finally:
            self._draining = False
            self._wake.set()

    def _on_death(self, rank: int, lived_s: float, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        self._backoff.died(rank, lived_s, now)
        if self._backoff.exhausted(rank, now):
            self.error = f"engine {rank} dies again and again, the last time because: {reason}"
            self._resign()

    def _resign(self) -> None:
        living = len(self._fleet.staying) + len(self._fleet.starting)
        self.target = max(living, self.config.cluster.min_engines)
        self._failed = self._resigned = True
        self._log.error("no engine is started any more", target=self.target, error=self.error)

    # ---------------------------------------------------------------- what the coordinator says

    @property
    def _note(self) -> ManagerNote:
        return ManagerNote(self._owner, self.target, self.held, self.phase)

    async def _follow_forever(self) -> None:
        epoch = -1
        while self._rules:
            try:
                now = await self._coordinator.wait(epoch, 2 * self.config.cluster.heartbeat_s)
                epoch, self._view = now.view.roster.epoch, now.view
                await self._heed(now)
            except Exception as error:
                self._log.error("cannot follow", error=f"{type(error).__name__}: {error}")
                await asyncio.sleep(_PAUSE_S)

    async def _heed(self, now: Membership) -> None:
        """A coordinator that was restarted knows only what engines have told it."""
        if now.note.owner not in ("", self._owner):
            self._log.warning("another manager rules: this one does nothing more")
            self._rules = False
            await self._fleet.rest()
            return
        if now.note != self._note:
            self._coordinator.note(self._note)
        if self.held and now.view.state == "serving":
            await self._coordinator.hold()
        if not self.held and now.view.state == "paused":
            await self._coordinator.release()
        await self._compare(now)

    async def _compare(self, now: Membership) -> None:
        """Engines that the roster misses, and members that are no engines of ours."""
        seen, self._verdicts_seen = self._verdicts_seen, len(now.verdicts)
        fresh = now.verdicts[seen:] if seen <= len(now.verdicts) else now.verdicts
        reasons = {verdict.rank: verdict.reason for verdict in fresh}
        fleet = self._fleet
        for rank, handle in list(fleet.engines.items()):
            assert handle.ready is not None
            member = now.view.roster.find(rank, handle.ready.incarnation)
            if handle.moving:
                continue
            if member is None:
                fleet.spawn(fleet.missed(handle, reasons.get(rank)))
            elif handle.leaving and member.state is MemberState.ACTIVE:
                await self._coordinator.leave([rank])
        ours = {*fleet.engines, *fleet.starting, *fleet.ending}
        strangers = [rank for rank in now.view.roster.ranks if rank not in ours]
        if strangers:
            await self._coordinator.lose(strangers)
