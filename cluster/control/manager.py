"""Keeps the number of engines at its target. No other component changes the roster on purpose.

    target --- start ---> starting --- join ---> serving --- leave ---> leaving --- detach ---> gone
                            |                      |   ^                  |
                    failed or cancelled            |   +----- keep -------+
                                  died or hung: removed at once, replaced

This is the shell: `control_state.py` decides. One task plans and starts the missing engines. Starts
and drains run concurrently, so a slow one does not delay the others. Another task follows the
roster, from which the coordinator removes stopped engines. Requests only change the target: the
newest one counts. Failed steps are retried with a growing delay, and `describe` reports them.

The manager carries no traffic. It stores its desired state (`checkpoint_store.py`) for a successor.
If two managers run, as when Serve replaces one that hung, the one that took over last leads.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

from swell.cluster.control.cluster_status import ManagerStatus, describe
from swell.cluster.control.elasticity import Elasticity
from swell.cluster.control.engines.engine_handle import EngineHandle, StartFailed
from swell.cluster.control.engines.fleet import Fleet
from swell.cluster.control.engines.placement import Placement
from swell.cluster.control.engines.roster_check import RosterCheck
from swell.cluster.control.plan import control_state
from swell.cluster.control.plan.backoff import MissingEngine
from swell.cluster.control.plan.checkpoint import ClusterCheckpoint
from swell.cluster.control.plan.control_state import (
    ControlState,
    Leadership,
    Plan,
    ScaleRefused,
    StartFailure,
)
from swell.cluster.control.plan.fleet_view import Intent
from swell.cluster.control.ray.checkpoint_writer import CheckpointWriter
from swell.cluster.control.ray.coordinator_handle import CoordinatorHandle
from swell.cluster.control.upgrader import Upgrader
from swell.cluster.text.adapters import LoadedAdapters
from swell.cluster.text.json_types import JsonObject
from swell.configs.runtime.log import StructuredLogger
from swell.configs.runtime.process import exit_on_error_async
from swell.configs.schema import Config
from swell.coordinator.manager_state import DesiredState, ManagerState, NotLeading, Sleep
from swell.coordinator.roster import Roster
from swell.coordinator.service import Membership
from swell.coordinator.transport.runtime import Runtime
from swell.coordinator.wire import ClusterView

_ANSWER_TIMEOUT_S = 2.0
"""How long `describe` waits for the coordinator before it returns the last known state, and how
long a pause waits to learn who leads."""
_PAUSE_S = 1.0
"""Delay before a failed step is retried."""


class ClusterManager:
    """Manages the engines of a cluster from start to stop. All methods run in one event loop."""

    def __init__(
        self,
        config: Config,
        coordinator: CoordinatorHandle,
        placement: Placement,
        checkpoints: CheckpointWriter,
        runtime: Runtime,
        config_hash: str,
    ) -> None:
        """`config_hash`: hash of the configuration as it was given."""
        self._limits = config.cluster
        self._coordinator = coordinator
        self._placement = placement
        self._checkpoints = checkpoints
        self._lifecycle_lock = asyncio.Lock()
        """Held during `start` and during `stop`."""
        self._scale_lock = asyncio.Lock()
        """Held until it is known whether there is room, so that requests take effect in order."""
        self._wake = asyncio.Event()
        self._fleet = Fleet(
            config.cluster,
            coordinator,
            placement,
            runtime,
            self._on_death,
            on_change=self._wake.set,
        )
        stall_s = self._limits.stall_timeout_s
        self._roster_check = RosterCheck(self._fleet, coordinator, placement, stall_s)
        self.upgrader = Upgrader(config_hash, config, self._fleet, placement)
        self._elasticity = Elasticity(
            config, self._fleet, placement, lambda: (self.target, self.upgrader.wanted.config)
        )
        self._state: ControlState = control_state.initial(config)
        self.adapters = LoadedAdapters(config.lora, config.model.served_name, self._wake.set)
        self._view = ClusterView(Roster())
        self._log = StructuredLogger("cluster.manager")

    async def start(self) -> None:
        """Takes over the state that an earlier manager left, and starts to reconcile."""
        async with self._lifecycle_lock:
            await self._coordinator.open()
            found = await self._claim()
            self._view = found.view
            previous = await self._checkpoints.take_over(found.manager_state.desired)
            is_paused = self._view.reports.state == "paused"
            self._state = control_state.take_over(
                self._state, previous, is_paused=is_paused, limits=self._limits
            )
            self.upgrader.take_over(previous.upgrade, found)
            self.adapters.take_over(previous.desired.adapters)
            self.upgrader.set_needed(found.versions)
            self._fleet.inherit(previous.drains)
            await self.save()
            await self._coordinator.take_over(self._manager_state)
            newcomers = await self.upgrader.adopt(self.target)
            # The earlier manager may have been lost before it recorded that they had joined.
            self._state = control_state.on_joined(self._state, self._fleet.view().serving)
            if not previous.desired.target:
                self._state = control_state.adopt(self._state, self._fleet.view(), self._limits)
            if newcomers:
                self._fleet.tasks.spawn(self._grow(newcomers, is_requested=False))
            for loop, name in (
                (self._reconcile_forever, "reconcile"),
                (self._watch_membership_forever, "membership"),
                (self._placement.orphans.collect_forever, "orphans"),
                (self._elasticity.follow_nodes_forever, "nodes"),
            ):
                self._fleet.tasks.spawn(exit_on_error_async(loop, f"manager: {name}"))

    async def _claim(self) -> Membership:
        """Claims leadership. Returns what the coordinator knows then: the earlier manager may have
        sent its newest state just before."""
        await self._checkpoints.claim()
        found = await self._coordinator.membership()
        known, own = found.manager_state, self._checkpoints.manager_id()
        if not known.is_led_by(own) and await self._checkpoints.is_leader():
            # The store has lost the terms of earlier managers.
            await self._checkpoints.claim(known.desired.term)
            found = await self._coordinator.membership()
        return found

    async def leave(self) -> None:
        """Stops working without terminating anything: a successor takes over."""
        await self._fleet.tasks.cancel()

    async def stop(self) -> None:
        """Lets the engines finish their requests, then terminates them and the coordinator, unless
        another manager leads. A `start` in progress completes first.

        Serve stops the ingresses at the same time: they refuse new requests and finish their
        streams.
        """
        async with self._lifecycle_lock:
            await self._fleet.tasks.cancel()
            if not (self.leads and await self._checkpoints.is_leader()):
                return
            self._state = control_state.end(self._state)
            try:
                await self._fleet.wait_idle(self._limits.drain_timeout_s)
            except Exception as error:  # an engine that cannot be drained is terminated anyway
                self._log.warning("not drained", error=f"{type(error).__name__}: {error}")
            if not await self._checkpoints.is_leader():
                return
            await self._placement.close(self._fleet.handles)
            await self._coordinator.close()
            await self._checkpoints.clear()

    # ---------------------------------------------------------------- requests of operators

    @property
    def target(self) -> int:
        """The target number of engines."""
        return self._state.change.target

    @property
    def pause_requested(self) -> bool:
        return self._state.pause_requested

    async def scale(self, engines: int, drain_timeout_s: float | None = None) -> None:
        """Sets the target number of engines, even during a change. Raises ScaleRefused."""
        async with self._scale_lock:
            grows = engines > len(self._fleet.view().staying)
            reason = await self._placement.refusal(self.upgrader.wanted, engines) if grows else None
            fleet = self._fleet.view()
            state = control_state.scale(self._state, fleet, engines, self._limits, drain_timeout_s)
            if reason is not None:
                raise ScaleRefused(reason)
            self._fleet.set_drain_time(state.change.drain_timeout_s)
            self._begin(state)

    async def upgrade(self, config_hash: str, config: Config, *, in_place: bool = False) -> None:
        """Replaces all engines by engines with another configuration, or `in_place` only their
        weights. Returns once the request survives this manager. Raises ScaleRefused."""
        control_state.check_accepts(self._state)
        if in_place:
            control_state.check_awake(self._state)
        try:
            await self.upgrader.begin(
                config_hash, config, self.target, self.save, in_place=in_place
            )
        finally:  # a failed request may have been written anyway
            self._wake.set()

    def drain(self, rank: int) -> None:
        """Takes one engine out and lowers the target by one. If the engine is already leaving, its
        drain time starts again. Raises ScaleRefused."""
        state = control_state.drain(self._state, self._fleet.view(), rank, self._limits)
        self._fleet.leave(rank, self._limits.drain_timeout_s, is_drain=True)
        self._begin(state)

    def _begin(self, state: ControlState) -> None:
        """Starts a change at once; `_reconcile_forever` does what cannot start yet."""
        self._state = state
        self._reconcile()
        self._wake.set()

    async def pause(self, sleep: Sleep | None = None) -> None:
        """Stops all computation; engines keep their requests and with `sleep` release memory. A
        change in progress continues: new engines are paused as they join, and leaving engines hand
        over their requests. Raises ScaleRefused."""
        await self._set_pause(True, sleep)

    async def resume(self) -> None:
        """Ends a pause. Raises ScaleRefused."""
        await self._set_pause(False)

    def reset_prefix_cache(self) -> None:
        """Lets all ingresses give new requests another cache salt, with which no engine, host
        memory or folder has a block. Raises ScaleRefused."""
        self._state = control_state.reset_prefix_cache(self._state)
        self._wake.set()

    async def _set_pause(self, paused: bool, sleep: Sleep | None = None) -> None:
        if not await self._checkpoints.is_leader_within(_ANSWER_TIMEOUT_S):
            raise ScaleRefused(control_state.TAKEN_OVER)
        self._state = control_state.set_pause(self._state, paused, sleep)
        self._wake.set()
        try:
            await (self._coordinator.pause() if paused else self._coordinator.resume())
        except NotLeading:  # another manager took over after the check
            raise ScaleRefused(control_state.TAKEN_OVER) from None

    async def save(self) -> None:
        """Stores the newest request so that it survives this manager. Raises ScaleRefused."""
        control_state.check_accepts(self._state)
        if not await self._checkpoints.save(self._checkpoint()):
            raise ScaleRefused(control_state.TAKEN_OVER)

    def _checkpoint(self) -> ClusterCheckpoint:
        state = self._state
        desired = DesiredState(
            target=state.change.target,
            pause_requested=state.pause_requested,
            served=state.has_served,
            adapters=self.adapters.all,
            sleep=state.sleep,
            cache_generation=state.cache_generation,
        )
        return self._checkpoints.make(desired, self.upgrader.record, self._fleet.drains)

    # ---------------------------------------------------------------- state for operators

    @property
    def phase(self) -> str:
        """Phase of the change of the number of engines: see `control_state.phase`."""
        return control_state.phase(self._state, self._fleet.view(), self._now())

    @property
    def missing_engine(self) -> MissingEngine | None:
        """Why engines are missing."""
        return control_state.missing_engine(self._state, self._fleet.view(), self._now())

    @property
    def error(self) -> str | None:
        """The last error while it still matters, and when it is retried."""
        reason = self._state.change.error or (
            str(found) if (found := self.missing_engine) else None
        )
        return "; ".join(filter(None, (reason, self._checkpoints.error))) or None

    async def describe(self) -> JsonObject:
        """Returns the body of `GET /admin/cluster`."""
        silence = None
        self._fleet.ask_starting()
        status = ManagerStatus(  # read before the roster, which has what completes in between
            target=self.target,
            phase=self.phase,
            error=self.error,
            missing_engine=self.missing_engine,
            leftovers=self._placement.orphans.leftovers(),
            hang_reports=tuple(self._placement.hang_reports),
            upgrade=self.upgrader.describe(self.missing_engine),
            scaling=self._elasticity.describe(),
            cache_generation=self._state.cache_generation,
        )
        try:
            view = self._coordinator.view_and_contact()
            self._view = await asyncio.wait_for(view, _ANSWER_TIMEOUT_S)
        except Exception as error:  # the coordinator has stopped, or is being restarted
            silence = f"it does not answer ({type(error).__name__}); the call is retried"
            self._log.warning("the coordinator does not answer", error=type(error).__name__)
        handles = {**self._fleet.starting, **self._fleet.engines}
        coordinator: JsonObject = {"pid": self._coordinator.pid, "error": silence}
        return describe(self._view, handles, coordinator, status)

    async def not_ready_reason(self) -> tuple[str, bool]:
        """Returns one line for waiting people, and whether the first start has failed for good. It
        is retried even then, for callers that keep waiting."""
        missing_engine = self.missing_engine
        if missing_engine is not None and missing_engine.exhausted and not self._state.has_served:
            return missing_engine.reason, True
        texts = [*await self._fleet.starting_texts(), self.error]
        return "; ".join(filter(None, texts)) or "waiting for the first engine", False

    # ---------------------------------------------------------------- reconciliation

    async def _reconcile_forever(self) -> None:
        while self.leads:
            self._wake.clear()
            try:
                wait_s = self._reconcile()
            except Exception as error:  # the target stays as it is
                self._log.error("cannot reconcile", error=f"{type(error).__name__}: {error}")
                wait_s = _PAUSE_S
            self._coordinator.save_manager_state(self._manager_state)
            self._fleet.tasks.spawn(self._checkpoints.save_until_written(self._checkpoint))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):  # `wait_for` may swallow `stop`
                    await self._wake.wait()

    def _reconcile(self) -> float | None:
        """Starts what is missing. Returns the seconds until the next plan if nothing happens."""
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
            self._log.error("engines of one rank die repeatedly", rank=rank, reason=reason)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    # ---------------------------------------------------------------- coordinator and leadership

    @property
    def _manager_state(self) -> ManagerState:
        counts = self._elasticity.counts(self.upgrader.status)
        return ManagerState(self._checkpoint().desired, self.phase, counts)

    @property
    def leads(self) -> bool:
        """False: another manager has taken over, and this one does nothing more."""
        return self._state.leadership in (Leadership.LEADER, Leadership.ENDING)

    async def _watch_membership_forever(self) -> None:
        epoch = -1
        while self.leads:
            try:
                now = await self._coordinator.wait(epoch, 2 * self._limits.heartbeat_s)
                epoch, self._view = now.view.roster.epoch, now.view
                await self._on_membership(now)
            except Exception as error:
                self._log.error(
                    "cannot follow the roster", error=f"{type(error).__name__}: {error}"
                )
                epoch = -1  # what was not done must not wait for another roster
                await asyncio.sleep(_PAUSE_S)
                await self._reopen_coordinator()

    async def _reopen_coordinator(self) -> None:
        """Restarts a coordinator that is dead for good, unless another manager leads: one with
        another configuration terminates the old coordinator."""
        if not await self._checkpoints.is_leader():
            await self._step_down()
            return
        try:
            await self._coordinator.open()
        except Exception as error:
            self._log.error("no coordinator", error=f"{type(error).__name__}: {error}")

    async def _step_down(self) -> None:
        self._log.warning("another manager leads: this one stops")
        self._state = control_state.depose(self._state)
        await self._fleet.tasks.cancel()

    async def _on_membership(self, now: Membership) -> None:
        """Corrects the coordinator's state, which after a restart is only what engines report."""
        if not now.manager_state.is_led_by(self._checkpoints.manager_id()):
            await self._step_down()
            return
        if self.upgrader.set_needed(now.versions):
            self._wake.set()
        if now.manager_state != (state := self._manager_state):
            self._coordinator.save_manager_state(state)
        if self.pause_requested and now.view.reports.state == "serving":
            await self._coordinator.pause()
        if not self.pause_requested and now.view.reports.state == "paused":
            await self._coordinator.resume()
        await self._roster_check.compare(now)
        if (wanted := self._elasticity.follow_load(now, self._state)) is not None:
            self._begin(wanted)
