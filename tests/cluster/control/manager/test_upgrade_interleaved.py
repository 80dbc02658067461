"""Upgrades that coincide with other changes: no wake-up is lost, and nothing outdated is
remembered."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from swell.cluster.control.plan import upgrade_plan
from swell.cluster.control.plan.control_state import ScaleRefused
from swell.cluster.control.plan.fleet_view import EngineStatus, FleetView, Place
from swell.cluster.control.plan.upgrade import UpgradeState
from swell.cluster.control.plan.versions import UpgradeRecord, UpgradeStage, Version
from swell.configs.schema import load
from tests.cluster.control.fake_manager import ManagerHarness, run

CONFIG = load({"model": {"path": "m"}})
ONE, TWO = Version.of(1, "one", CONFIG), Version.of(2, "two", CONFIG)


def settled(**fields: object) -> UpgradeRecord:
    record = UpgradeRecord((ONE, TWO), TWO.name, ONE.name, proven=(ONE.name, TWO.name))
    return replace(record, **fields)


def serving(*versions: Version) -> FleetView:
    return FleetView(
        tuple(
            EngineStatus(rank, Place.SERVING, version=version.name)
            for rank, version in enumerate(versions)
        )
    )


@pytest.mark.parametrize("stage", [UpgradeStage.SETTLED, UpgradeStage.FAILED])
def test_engines_leave_first_only_until_all_are_of_one_version(stage: UpgradeStage) -> None:
    """The upgrade was in place because an engine that answers needed again had no room next to the
    others."""
    state = UpgradeState(settled(in_place=True, stage=stage))
    after, _ = upgrade_plan.plan(state, serving(TWO, TWO), 2, (), 0.0)
    assert not after.record.in_place and after.record.stage is stage


def test_only_consecutive_starts_without_room_count() -> None:
    """Failures before an engine that has started since do not count for the next one."""
    state = UpgradeState(settled(stage=UpgradeStage.IN_PROGRESS, in_place=True), no_room=2)
    missing, _ = upgrade_plan.plan(state, serving(TWO), 2, (), 0.0)
    assert missing.no_room == 2
    whole, _ = upgrade_plan.plan(state, serving(TWO, ONE), 2, (), 0.0)
    assert whole.no_room == 0


def test_an_upgrade_request_that_is_not_stored_leaves_no_trace() -> None:
    """Ray's GCS takes the checkpoint but answers late. The next manager must not find it."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        store, write = harness.checkpoints, harness.checkpoints.write

        async def write_late(note: object) -> None:
            await write(note)  # type: ignore[arg-type]
            await asyncio.sleep(1e6)

        store.write = write_late  # type: ignore[method-assign, assignment]
        with pytest.raises(ScaleRefused, match="nothing was changed"):
            await harness.upgrade("other")
        store.write = write  # type: ignore[method-assign]
        await asyncio.sleep(60.0)
        assert store.page[0].upgrade.wanted == harness.manager.upgrader.record.wanted
        await harness.lose_manager()
        await harness.start()
        assert harness.versions == ["1-configuration"]

    run(scenario)
