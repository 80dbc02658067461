"""Keeps as many engines as are wanted. Nothing else changes the roster on purpose.

    target --- start ---> starting --- join ---> serving --- leave ---> leaving --- detach ---> gone
                            |                      |   ^                  |
                    failed or cancelled            |   +----- keep -------+
                                  died, or found to have stopped: removed at once, replaced

This is the shell: `control_state.py` decides. One task plans and begins what is missing; starts and
drains run beside it, so that a slow one delays no other. Another task watches the roster, from
which the coordinator takes what has stopped. Requests only move the target, and the newest one
counts. What fails is tried again, ever more slowly, and `describe` says so.

The manager carries no traffic. What it wants is written down (`checkpoint_store.py`) for its
successor. Of two, as when Serve replaces one that was stopped, the one that took over last leads.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import Any

from swell.cluster.control import control_state
from swell.cluster.control.backoff import Trouble
from swell.cluster.control.checkpoint_store import CheckpointStore, ClusterCheckpoint
from swell.cluster.control.checkpoint_writer import CheckpointWriter
from swell.cluster.control.cluster_status import describe
from swell.cluster.control.control_state import (
    ControlState,
    Leadership,
    Plan,
    ScaleRefused,
    StartFailure,
)
from swell.cluster.control.coordinator_handle import CoordinatorHandle
from swell.cluster.control.elasticity import Elasticity
from swell.cluster.control.engine_handle import EngineHandle, StartFailed
from swell.cluster.control.fleet import Fleet
from swell.cluster.control.fleet_view import Intent
from swell.cluster.control.placement import Placement
from swell.cluster.control.upgrader import Upgrader
from swell.cluster.text.adapters import LoadedAdapters
from swell.configs.log import StructuredLogger
from swell.configs.process import exit_on_error_async
from swell.configs.schema import Config
from swell.coordinator.ground import Ground
from swell.coordinator.manager_state import ManagerState, NotLeading, Sleep
from swell.coordinator.roster import Roster
from swell.coordinator.service import Membership
from swell.coordinator.wire import ClusterView

_ANSWER_TIMEOUT_S = 2.0
"""How long a description waits for the coordinator before it gives what was known last, and a pause
for the answer whether another manager has taken over."""
_PAUSE_S = 1.0
"""After something failed that is tried again."""


class ClusterManager:
    """The engines of a cluster, from start to end. All methods run in one event loop."""

    def __init__(
        self,
        config: Config,
        coordinator: CoordinatorHandle,
        placement: Placement,
        checkpoints: CheckpointStore,
        ground: Ground,
        identity: str,
    ) -> None:
        """`identity`: of the configuration as it was given; see `configs/identity.py`."""
        self._limits = config.cluster
        self._coordinator = coordinator
        self._placement = placement
        self._checkpoints = CheckpointWriter(checkpoints, config.parallel.data, ground)
        coordinator.manager_id = self._checkpoints.manager_id
        self._lifecycle_lock = asyncio.Lock()
        """Held while it starts, and while it stops."""
        self._scale_lock = asyncio.Lock()
        """Held until it is known whether there is room: requests take effect in their order."""
        placement.may_end = partial(self._checkpoints.confirm_leader, self._limits.stall_timeout_s)
        self._wake = asyncio.Event()
        self._fleet = Fleet(
            config.cluster, coordinator, placement, ground, self._on_death, on_change=self._wake.set
        )
        self.upgrader = Upgrader(identity, config, self._fleet, placement)
        self._elasticity = Elasticity(
            config, self._fleet, placement, lambda: (self.target, self.upgrader.wanted.config)
        )
        self._state: ControlState = control_state.initial(config)
        self.adapters = LoadedAdapters(config.lora, config.model.served_name, self._wake.set)
        self._view = ClusterView(Roster())
        self._log = StructuredLogger("cluster.manager")

    async def start(self) -> None:
        """Take over what an earlier manager left, and begin to reconcile."""
        async with self._lifecycle_lock:
            await self._coordinator.open()
            found = await self._coordinator.membership()
            self._view = found.view
            previous = await self._checkpoints.load_previous(found.manager_state)
            is_paused = self._view.state == "paused"
            self._state = control_state.take_over(
                self._state, previous, is_paused=is_paused, limits=self._limits
            )
            self.upgrader.take_over(previous.upgrade)
            self.adapters.all = previous.adapters
            self.upgrader.set_needed(found.versions)
            await self.save()
            await self._coordinator.take_over(self._manager_state)
            newcomers = await self.upgrader.adopt(self.target, previous.drains)
            if not previous.target:
                self._state = control_state.adopt(self._state, self._fleet.view(), self._limits)
            if newcomers:
                self._fleet.tasks.spawn(self._grow(newcomers, is_requested=False))
            for loop, name in (
                (self._reconcile_forever, "reconcile"),
                (self._watch_membership_forever, "membership"),
                (self._placement.strays.collect_forever, "strays"),
                (self._elasticity.follow_nodes_forever, "nodes"),
            ):
                self._fleet.tasks.spawn(exit_on_error_async(loop, f"manager: {name}"))

    async def leave(self) -> None:
        """Do nothing more: a successor takes over."""
        await self._fleet.tasks.cancel()

    async def stop(self) -> None:
        """Let the engines finish what they have, then end them and the coordinator; unless
        another manager has taken over. What `start` is just taking over is ended, too.

        Serve stops the ingresses at the same time: they take nothing new and finish their streams.
        """
        async with self._lifecycle_lock:
            await self._fleet.tasks.cancel()
            if not (self.leads and await self._checkpoints.is_leader()):
                return
            try:
                await self._fleet.wait_idle(self._limits.drain_timeout_s)
            except Exception as error:  # an engine that cannot be drained is ended all the same
                self._log.warning("not drained", error=f"{type(error).__name__}: {error}")
            if not await self._checkpoints.is_leader():
                return
            await self._placement.close(self._fleet.handles)
            await self._coordinator.close()
            await self._checkpoints.clear()

    # ---------------------------------------------------------------- what operators request

    @property
    def target(self) -> int:
        """How many engines are wanted."""
        return self._state.change.target

    @property
    def pause_requested(self) -> bool:
        return self._state.pause_requested

    async def scale(self, engines: int, drain_timeout_s: float | None = None) -> None:
        """Set how many engines are wanted; this replaces a change that is under way. Raises
        ScaleRefused; the state is then unchanged."""
        async with self._scale_lock:
            grows = engines > len(self._fleet.view().staying)
            reason = await self._placement.refusal(self.upgrader.wanted, engines) if grows else None
            fleet = self._fleet.view()
            state = control_state.scale(self._state, fleet, engines, self._limits, drain_timeout_s)
            if reason is not None:
                raise ScaleRefused(reason)
            self._fleet.set_drain_time(state.change.drain_timeout_s)
            self._begin(state)

    async def upgrade(self, identity: str, config: Config, *, in_place: bool = False) -> None:
        """Replace all engines by those of another configuration; `in_place`: their weights alone.
        Returns when that outlives this manager. Raises ScaleRefused."""
        if in_place:
            control_state.check_awake(self._state)
        try:
            await self.upgrader.begin(identity, config, self.target, self.save, in_place=in_place)
        finally:  # one that failed was perhaps written
            self._wake.set()

    def drain(self, rank: int) -> None:
        """Take one engine out; the target falls with it. The time of one that leaves already begins
        anew. Raises ScaleRefused."""
        state = control_state.drain(self._state, self._fleet.view(), rank, self._limits)
        self._fleet.leave(rank, self._limits.drain_timeout_s, is_drain=True)
        self._begin(state)

    def _begin(self, state: ControlState) -> None:
        """Begin a change at once; what it cannot begin yet follows in `_reconcile_forever`."""
        self._state = state
        self._reconcile()
        self._wake.set()

    async def pause(self, sleep: Sleep | None = None) -> None:
        """Let all engines keep their requests and compute nothing; with `sleep` they give memory
        back until `resume`. A change under way goes on: newcomers are paused as they join, engines
        that leave hand over. Raises ScaleRefused."""
        await self._set_pause(True, sleep)

    async def resume(self) -> None:
        """Raises ScaleRefused."""
        await self._set_pause(False)

    async def _set_pause(self, paused: bool, sleep: Sleep | None = None) -> None:
        if not await self._checkpoints.is_leader_within(_ANSWER_TIMEOUT_S):
            raise ScaleRefused(control_state.TAKEN_OVER)
        self._state = control_state.set_pause(self._state, paused, sleep)
        self._wake.set()
        try:
            await (self._coordinator.pause() if paused else self._coordinator.resume())
        except NotLeading:  # since that was looked up
            raise ScaleRefused(control_state.TAKEN_OVER) from None

    async def save(self) -> None:
        """Return when the newest request outlives this manager. Raises ScaleRefused."""
        if not await self._checkpoints.save(self._checkpoint()):
            raise ScaleRefused(control_state.TAKEN_OVER)

    def _checkpoint(self) -> ClusterCheckpoint:
        served, record, drains = self._state.has_served, self.upgrader.record, self._fleet.drains
        wanted = (self.target, self.pause_requested, served, record, drains, self.adapters.all)
        return self._checkpoints.make(*wanted, self._state.sleep)

    # ---------------------------------------------------------------- what operators see

    @property
    def phase(self) -> str:
        """Of the change of engines: idle, prepare, commit, drain or failed."""
        return control_state.phase(self._state, self._fleet.view(), self._now())

    @property
    def trouble(self) -> Trouble | None:
        """What keeps engines that are missing from being there."""
        return control_state.trouble(self._state, self._fleet.view(), self._now())

    @property
    def error(self) -> str | None:
        """What went wrong last, while it still matters, and what is tried again when."""
        reason = self._state.change.error or (str(found) if (found := self.trouble) else None)
        return "; ".join(filter(None, (reason, self._checkpoints.trouble))) or None

    async def describe(self) -> dict[str, Any]:
        """The body of `GET /admin/cluster`."""
        silence = None
        plans = {  # of one moment; a change that is over is in the roster that is read now
            "target": self.target,
            "phase": self.phase,
            "error": self.error,
            "trouble": self.trouble,
            "leftovers": self._placement.strays.leftovers(),
            "upgrade": self.upgrader.describe(self.trouble),
            **self._elasticity.describe(),
        }
        try:
            self._view = await asyncio.wait_for(self._coordinator.view(), _ANSWER_TIMEOUT_S)
        except Exception as error:  # it is stopped, or was lost and is made anew
            silence = f"it does not answer ({type(error).__name__}); it is called again and again"
            self._log.warning("the coordinator does not answer", error=type(error).__name__)
        await self._fleet.refresh(self._view.reports)
        handles = {**self._fleet.starting, **self._fleet.engines}
        coordinator = {"pid": self._coordinator.pid, "error": silence}
        return describe(self._view, handles, coordinator=coordinator, **plans)

    async def not_ready_reason(self) -> tuple[str, bool]:
        """One line for people who wait for the cluster, and whether the first start was in vain:
        it is tried again all the same, for callers that go on waiting."""
        trouble = self.trouble
        if trouble is not None and trouble.exhausted and not self._state.has_served:
            return trouble.reason, True
        texts = [*await self._fleet.starting_texts(), self.error]
        return "; ".join(filter(None, texts)) or "the first engine", False

    # ---------------------------------------------------------------- what is wanted, what is

    async def _reconcile_forever(self) -> None:
        while self.leads:
            self._wake.clear()
            try:
                wait_s = self._reconcile()
            except Exception as error:  # the target stays
                self._log.error("cannot reconcile", error=f"{type(error).__name__}: {error}")
                wait_s = _PAUSE_S
            self._coordinator.save_manager_state(self._manager_state)
            self._fleet.tasks.spawn(self._checkpoints.save_until_written(self._checkpoint))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):  # `wait_for` may swallow `stop`
                    await self._wake.wait()

    def _reconcile(self) -> float | None:
        """Begin what is missing. Returns when to plan again if nothing happens."""
        extra_wait_s = self.upgrader.reconcile(self._state, self._grow)
        self._state, plan = control_state.plan(self._state, self._fleet.view(), self._now())
        self._execute(plan)
        return min(filter(None, (plan.wait_s, extra_wait_s)), default=None)

    def _execute(self, plan: Plan) -> None:
        for rank in plan.keep:
            self._fleet.keep(rank)
        for rank in plan.cancel:
            self._fleet.cancel_start(rank)
        for rank in plan.leave:
            self._fleet.leave(rank, self._state.change.drain_timeout_s)
        if plan.start:
            handles = self._fleet.add_starting(dict.fromkeys(plan.start, self.upgrader.serving))
            self._fleet.tasks.spawn(self._grow(handles, is_requested=plan.is_requested))
        self._fleet.drain()

    async def _grow(self, handles: list[EngineHandle], *, is_requested: bool) -> None:
        if not await self._checkpoints.is_leader():
            await self._step_down()
            return
        on_failed = partial(self._on_failed, is_requested=is_requested)
        await self._fleet.grow(handles, self._on_joined, on_failed)

    def _on_joined(self, ranks: list[int]) -> None:
        self._state = control_state.on_joined(self._state, ranks)
        self.upgrader.on_joined(ranks)

    def _on_failed(self, handle: EngineHandle, error: Exception, *, is_requested: bool) -> None:
        if self.upgrader.take_failure(handle, error, self.target):
            return
        self._log.error("engine did not start", rank=handle.rank, error=str(error))
        permanent = isinstance(error, StartFailed) and error.permanent
        failure, before = StartFailure(handle.rank, str(error), permanent), self._state.change
        self._state = control_state.on_failed(
            self._state, self._fleet.view(), failure, self._now(), is_requested=is_requested
        )
        if self._state.change is not before:
            self._log.error("change failed", error=self._state.change.error)

    def _on_death(self, handle: EngineHandle, lived_s: float, reason: str) -> None:
        rank, now = handle.rank, self._now()
        self.upgrader.on_death(handle.version_name, lived_s, reason)
        if handle.intent in (Intent.STAY, Intent.RELOAD):
            self._state = control_state.on_death(self._state, rank, lived_s, now, reason)
        if self._state.backoff.exhausted(rank):
            self._log.error("engines of one rank die again and again", rank=rank, reason=reason)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    # ---------------------------------------------------------------- the coordinator, the leader

    @property
    def _manager_state(self) -> ManagerState:
        counts = self._elasticity.counts(self.upgrader.status)
        return self._checkpoint().manager_state(self.phase, counts)

    @property
    def leads(self) -> bool:
        """False: another manager has taken over, and this one does nothing more."""
        return self._state.leadership is Leadership.LEADER

    async def _watch_membership_forever(self) -> None:
        epoch = -1
        while self.leads:
            try:
                now = await self._coordinator.wait(epoch, 2 * self._limits.heartbeat_s)
                epoch, self._view = now.view.roster.epoch, now.view
                await self._on_membership(now)
            except Exception as error:
                self._log.error("cannot follow", error=f"{type(error).__name__}: {error}")
                await asyncio.sleep(_PAUSE_S)
                await self._reopen_coordinator()

    async def _reopen_coordinator(self) -> None:
        """The coordinator is dead for good, unless another manager has taken over: one that does so
        with another configuration ends it."""
        if not await self._checkpoints.is_leader():
            await self._step_down()
            return
        try:
            await self._coordinator.open()
        except Exception as error:
            self._log.error("no coordinator", error=f"{type(error).__name__}: {error}")

    async def _step_down(self) -> None:
        self._log.warning("another manager leads: this one does nothing more")
        self._state = control_state.depose(self._state)
        await self._fleet.tasks.cancel()

    async def _on_membership(self, now: Membership) -> None:
        """A coordinator that was restarted knows only what engines have reported."""
        if not now.manager_state.is_led_by(self._checkpoints.manager_id()):
            await self._step_down()
            return
        if self.upgrader.set_needed(now.versions):
            self._wake.set()
        if now.manager_state != (state := self._manager_state):
            self._coordinator.save_manager_state(state)
        if self.pause_requested and now.view.state == "serving":
            await self._coordinator.pause()
        if not self.pause_requested and now.view.state == "paused":
            await self._coordinator.resume()
        await self._fleet.roster_check.compare(now)
        if (wanted := self._elasticity.follow_load(now, self._state)) is not None:
            self._begin(wanted)
