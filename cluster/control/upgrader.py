"""Carries out upgrades for the manager; `upgrade.py` decides. No decisions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from swell.cluster.control import upgrade
from swell.cluster.control.control_state import Change, ScaleRefused
from swell.cluster.control.engine_handle import EngineHandle, NoRoom, StartFailed
from swell.cluster.control.fleet import Fleet
from swell.cluster.control.placement import Placement
from swell.cluster.control.upgrade import Failure, UpgradeRefused
from swell.cluster.control.versions import UpgradeRecord, UpgradeStage, Version
from swell.configs.log import StructuredLogger
from swell.configs.schema import Config

_SAVE_TIMEOUT_S = 10.0
"""How long the request may take to be stored: nothing is started before."""


class Grow(Protocol):
    """Starts engines for the manager."""

    def __call__(
        self, handles: list[EngineHandle], *, is_requested: bool
    ) -> Coroutine[Any, Any, None]: ...


class Upgrader:
    """The versions of one manager's engines. All methods run in its event loop."""

    def __init__(self, identity: str, config: Config, fleet: Fleet, placement: Placement) -> None:
        """`identity`: of the configuration with which the application was deployed."""
        self._identity, self._config = identity, config
        self._fleet, self._placement = fleet, placement
        self._state = upgrade.take_over(UpgradeRecord(), identity, config)
        self._needed: frozenset[str] = frozenset()
        self._is_saving = False
        """An upgrade was requested that is not stored yet."""
        self._log = StructuredLogger("cluster.upgrade")

    @property
    def record(self) -> UpgradeRecord:
        return self._state.record

    @property
    def wanted(self) -> Version:
        """The version of which all engines are to be."""
        return self.record.get(self.record.wanted)

    @property
    def serving(self) -> Version:
        """A version of which an engine has served, if there is one."""
        return self._state.starts

    def take_over(self, record: UpgradeRecord) -> None:
        self._state = upgrade.take_over(record, self._identity, self._config)
        if self.record.stage is not record.stage:
            self._log.info("upgrade", stage=self.record.stage, version=self.record.wanted)

    async def adopt(self, target: int) -> list[EngineHandle]:
        """As `Fleet.adopt`. An extra engine that an earlier manager began to start is one again."""
        newcomers = await self._fleet.adopt(self.record.versions)
        new = [handle for handle in newcomers if handle.version_name == self.record.wanted]
        is_settled = self.record.stage in (UpgradeStage.SETTLED, UpgradeStage.FAILED)
        if new and not is_settled and self._fleet.view().num_present > target:
            new[-1].is_extra = True
        return newcomers

    async def begin(
        self, identity: str, config: Config, target: int, save: Callable[[], Awaitable[None]]
    ) -> None:
        """Want another version: returns when that outlives the manager. Raises ScaleRefused; the
        engines stay as they are then."""
        if reason := await self._placement.refusal(Version.of(0, identity, config), target):
            raise UpgradeRefused(reason)
        if self._is_saving:
            raise UpgradeRefused("another upgrade is being requested: try again in some seconds")
        before, self._state = self._state, upgrade.begin(self._state, identity, config)
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
        """Versions by which answers have begun. Whether that is new."""
        before, self._needed = self._needed, frozenset(self.record.known(versions))
        return before != self._needed

    def reconcile(self, change: Change, grow: Grow) -> float | None:
        """Begin what is next. Returns when to look again if nothing happens."""
        if self._is_saving:
            return None
        fleet, now = self._fleet, asyncio.get_running_loop().time()
        view, stage = fleet.view(), self.record.stage
        self._state, plan = upgrade.plan(self._state, view, change.target, self._needed, now)
        versions = {engine.rank: engine.version for engine in view.engines}
        held = {rank: versions[rank] in self._needed for rank in plan.held}
        fleet.set_replaced(held, plan.vacating)
        for rank in plan.cancel:
            fleet.cancel_start(rank)
        for rank in plan.leave:
            fleet.leave(rank, change.drain_timeout_s, is_drain=True)
        if plan.extra is not None:
            (rank,) = fleet.view().free_ranks(1)
            handles = fleet.add_starting({rank: plan.extra})
            handles[0].is_extra = True
            fleet.spawn(grow(handles, is_requested=False))
        if self.record.stage is not stage:
            self._log.info("upgrade", stage=self.record.stage, version=self.record.wanted)
        return plan.wait_s

    def versions_of(self, ranks: Sequence[int]) -> dict[int, Version]:
        """Of engines that the manager starts."""
        view = self._fleet.view()
        chosen = upgrade.versions_of_starts(self._state, view, self._needed, len(ranks))
        return dict(zip(ranks, chosen, strict=True))

    def take_failures(
        self, handles: list[EngineHandle], errors: dict[int, BaseException], target: int
    ) -> dict[int, BaseException]:
        """Engines did not start. Returns those failures that say nothing about a version."""
        now, left = asyncio.get_running_loop().time(), {}
        for handle in handles:
            if (error := errors.get(handle.rank)) is None:
                continue
            failure = Failure(
                handle.version_name,
                str(error),
                handle.is_extra,
                isinstance(error, NoRoom),
                isinstance(error, StartFailed) and error.permanent,
            )
            self._state, is_handled = upgrade.on_failure(self._state, failure, target, now)
            if not is_handled:
                left[handle.rank] = error
            else:
                self._log.warning("not started", version=failure.version, error=failure.reason)
        return left

    def describe(self) -> dict[str, Any]:
        """For `/admin/cluster`."""
        record = self.record
        is_settled = record.stage is UpgradeStage.SETTLED
        return {
            "phase": str(record.stage),
            "version": record.wanted,
            "previous": None if is_settled else record.previous,
            "model": self.wanted.config.model.path,
            "error": record.error,
        }
