"""Carries out upgrades for the manager. No decisions: those are in `upgrade.py` and
`upgrade_plan.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from swell.cluster.control.cluster_status import upgrade_error
from swell.cluster.control.engines.engine_handle import EngineHandle, NoRoom, StartFailed
from swell.cluster.control.engines.fleet import Fleet
from swell.cluster.control.engines.placement import Placement
from swell.cluster.control.plan import upgrade, upgrade_plan
from swell.cluster.control.plan.backoff import MissingEngine
from swell.cluster.control.plan.control_state import Change, ControlState, ScaleRefused
from swell.cluster.control.plan.fleet_view import FleetView
from swell.cluster.control.plan.upgrade import Failure, UpgradeRefused
from swell.cluster.control.plan.upgrade_plan import UpgradePlan
from swell.cluster.control.plan.versions import UpgradeRecord, UpgradeStage, Version
from swell.cluster.text.json_types import JsonObject
from swell.configs.runtime.log import StructuredLogger
from swell.configs.schema import Config
from swell.coordinator.manager_state import UpgradeStatus
from swell.coordinator.service import Membership

_SAVE_TIMEOUT_S = 10.0
"""How long it may take to store the request; nothing starts before that."""
_UNREPORTED_HEARTBEATS = 5.0
"""The time within which the manager learns that answers need the version of a lost engine: each
ingress reports at every heartbeat, and the manager reads the reports at least every other one."""


class Grow(Protocol):
    """Starts engines for the manager."""

    def __call__(
        self, handles: list[EngineHandle], *, is_requested: bool
    ) -> Coroutine[Any, Any, None]: ...


class Upgrader:
    """The versions of one manager's engines. All methods run in its event loop."""

    def __init__(
        self, config_hash: str, config: Config, fleet: Fleet, placement: Placement
    ) -> None:
        """`config_hash`: hash of the configuration with which the application was deployed."""
        self._config_hash, self._config = config_hash, config
        self._fleet, self._placement = fleet, placement
        self._state = upgrade.take_over(UpgradeRecord(), config_hash, config)
        self._needed: frozenset[str] = frozenset()
        self._seen_at: dict[str, float] = {}
        """When the manager last had an engine of each version."""
        self._is_saving = False
        """An upgrade was requested that is not stored yet."""
        self._log = StructuredLogger("cluster.upgrade")

    @property
    def record(self) -> UpgradeRecord:
        return self._state.record

    @property
    def wanted(self) -> Version:
        """The target version, which all engines must run."""
        return self.record.get(self.record.wanted)

    @property
    def serving(self) -> Version:
        """The version with which replacements start: one that has served, if there is one."""
        return self._state.starts

    def take_over(self, record: UpgradeRecord, found: Membership) -> None:
        """Continues with the record of an earlier manager. `found`: its engines, and the versions
        that unfinished responses need."""
        in_use = {*found.versions, *(member.version for member in found.view.roster.members)}
        self._state = upgrade.take_over(record, self._config_hash, self._config, in_use)
        if self.record.stage is not record.stage:
            self._log.info("upgrade", stage=self.record.stage, version=self.record.wanted)

    async def adopt(self, target: int) -> list[EngineHandle]:
        """Like `Fleet.adopt`. Returns the engines that still have to load or join. One that was
        starting as an extra engine under an earlier manager is marked as extra again."""
        versions, wanted = self.record.versions, self.wanted
        related = {each.name for each in versions if each.weights_lineage == wanted.weights_lineage}
        adopted = await self._fleet.adopt(versions, related - {wanted.name})
        self.set_needed(adopted.needed)
        is_settled = self.record.stage in (UpgradeStage.SETTLED, UpgradeStage.FAILED)
        extras = self._needed if is_settled else {self.record.wanted, *self._needed}
        found = [handle for handle in adopted.newcomers if handle.version_name in extras]
        if found and self._fleet.view().num_present > target:
            found[-1].is_extra = True
        return adopted.newcomers

    async def begin(
        self,
        config_hash: str,
        config: Config,
        target: int,
        save: Callable[[], Awaitable[None]],
        *,
        in_place: bool = False,
    ) -> None:
        """Sets another target version. Returns once the request is stored and survives the manager.
        `in_place`: only the weights differ, and processes stay. Raises ScaleRefused and then
        changes nothing."""
        if reason := await self._placement.refusal(Version.of(0, config_hash, config), target):
            raise UpgradeRefused(reason)
        if self._is_saving:
            raise UpgradeRefused("another upgrade is being requested: try again in a few seconds")
        view = self._fleet.view()
        in_use = {name for each in view.engines for name in each.versions} | self._needed
        self._note_engines(view)
        before, recent = self._state, self._seen_at
        self._state = upgrade.begin(before, config_hash, config, in_use, recent, in_place=in_place)
        self._is_saving = True
        try:
            async with asyncio.timeout(_SAVE_TIMEOUT_S):
                await save()
        except BaseException as error:
            self._state = before
            if isinstance(error, ScaleRefused) or not isinstance(error, Exception):
                raise
            raise UpgradeRefused(
                f"Ray's GCS does not answer ({type(error).__name__}), so the request cannot be "
                "stored; nothing was changed: try again"
            ) from None
        finally:
            self._is_saving = False
        self._log.info("upgrade", stage=self.record.stage, version=self.record.wanted)

    def set_needed(self, versions: Sequence[str]) -> bool:
        """Sets the versions of unfinished responses. Returns whether they have changed."""
        before, self._needed = self._needed, frozenset(self.record.known(versions))
        return before != self._needed

    def reconcile(self, control: ControlState, grow: Grow) -> float | None:
        """Starts the next steps. Returns the seconds until the next plan if nothing happens
        before."""
        if self._is_saving:
            return None
        fleet, now = self._fleet, asyncio.get_running_loop().time()
        view, stage = fleet.view(), self.record.stage
        self._note_engines(view)
        change, asleep = control.change, control.sleep.level > 0
        wanted = (change.target, self._needed, now)
        self._state, plan = upgrade_plan.plan(self._state, view, *wanted, asleep=asleep)
        self._execute(plan, change, grow)
        versions = {engine.rank: engine.version for engine in view.engines}
        held = {rank: versions[rank] in self._needed for rank in plan.held}
        fleet.set_replaced(held, plan.vacating, is_reserved=plan.is_reserved)
        if self.record.stage is not stage:
            self._log.info("upgrade", stage=self.record.stage, version=self.record.wanted)
        if plan.changes_something:
            fleet.on_change()
        return plan.wait_s

    def _note_engines(self, view: FleetView) -> None:
        """Records which versions have engines, and forgets those that have had none for longer than
        reports of unfinished answers take."""
        now = asyncio.get_running_loop().time()
        since = now - _UNREPORTED_HEARTBEATS * self._config.cluster.heartbeat_s
        self._seen_at = {name: at for name, at in self._seen_at.items() if at >= since}
        self._seen_at |= {name: now for each in view.engines for name in each.versions}

    def _execute(self, plan: UpgradePlan, change: Change, grow: Grow) -> None:
        fleet = self._fleet
        for rank in plan.keep:
            fleet.keep(rank)
        for rank in plan.cancel:
            fleet.cancel_start(rank)
        for rank in plan.retarget:
            fleet.engines[rank].next_version = self.wanted
        for rank in plan.reload:
            fleet.reload(rank, self.wanted, change.drain_timeout_s)
        if reloading := fleet.take_reloading():
            fleet.tasks.spawn(grow(reloading, is_requested=False))
        for rank in plan.leave:
            fleet.leave(rank, change.drain_timeout_s, is_drain=True)
        if plan.gives_way is not None:
            rank = plan.gives_way
            fleet.leave(rank, change.drain_timeout_s)
            self._log.warning(
                "engine makes room for a version that unfinished answers need", rank=rank
            )
        if plan.takes_place is not None:
            fleet.starting[plan.takes_place].is_extra = False
        if plan.start is not None:
            (rank,) = fleet.view().free_ranks(1)
            (handle,) = fleet.add_starting({rank: plan.start})
            handle.is_extra = plan.is_extra
            handle.for_answers = plan.for_answers
            fleet.tasks.spawn(grow([handle], is_requested=False))

    def on_joined(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._state = upgrade.on_joined(self._state, self._fleet.engines[rank].version_name)

    def on_death(self, version: str, lived_s: float, reason: str) -> None:
        now = asyncio.get_running_loop().time()
        self._state = upgrade.on_death(self._state, version, lived_s, now, reason)

    def take_failure(self, handle: EngineHandle, error: Exception, target: int) -> bool:
        """Handles a failed start. Returns whether the upgrade handles it; if not, the failure also
        counts as a failed start of its rank."""
        failure = Failure(
            handle.version_name,
            str(error),
            handle.is_extra,
            handle.for_answers,
            isinstance(error, NoRoom),
            handle.previous is not None,
            isinstance(error, StartFailed) and error.permanent,
        )
        now = asyncio.get_running_loop().time()
        self._state, is_handled = upgrade.on_failure(self._state, failure, target, now)
        if is_handled:
            self._log.warning("not started", version=failure.version, error=failure.reason)
        return is_handled

    @property
    def status(self) -> UpgradeStatus:
        """The status for the metrics."""
        counts = self.record.counts
        return UpgradeStatus(self.record.phase, counts.done, counts.failed, counts.cancelled)

    def describe(self, missing: MissingEngine | None) -> JsonObject:
        """Returns the status for `/admin/cluster`. `missing`: why engines are missing."""
        record, now = self.record, asyncio.get_running_loop().time()
        found = upgrade.failing_version(self._state, self._needed, missing, now)
        return {
            "phase": record.phase,
            "version": record.wanted,
            "previous": None if record.stage is UpgradeStage.SETTLED else record.previous,
            "model": self.wanted.config.model.path,
            **upgrade_error(record.error, found),
        }
