"""Upgrades with a whole manager, on a scripted placement and coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from swell.cluster.control.engines.engine_handle import EngineHandle
from swell.cluster.control.plan.control_state import ScaleRefused
from swell.cluster.control.plan.versions import MAX_VERSIONS, UpgradeStage
from tests.cluster.control.fake_manager import START_S, ManagerHarness, busy, run

OLD, NEW = "1-configuration", "2-other"


async def until(true: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if true():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come true")


async def watched(harness: ManagerHarness, change: Awaitable[None]) -> tuple[int, int]:
    """Waits until the change has settled. Returns the minimum of active engines and the maximum of
    engines at any time."""
    least, most = len(harness.active), len(harness.placement.processes)
    ended = asyncio.ensure_future(change)
    while not ended.done():
        least = min(least, len(harness.active))
        most = max(most, len(harness.placement.groups))
        await asyncio.sleep(0.05)
    await ended
    return least, most


def upgrade(harness: ManagerHarness) -> Awaitable[None]:
    async def whole() -> None:
        await harness.upgrade("other")
        await harness.settle()

    return whole()


def test_engines_are_replaced_one_by_one_with_one_extra_at_most() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        assert harness.versions == [OLD] * 3
        assert await watched(harness, upgrade(harness)) == (3, 4)
        assert harness.versions == [NEW] * 3
        assert (await harness.manager.describe())["upgrade"] == {
            "phase": "idle",
            "version": NEW,
            "previous": None,
            "model": "m",
            "error": None,
            "failures": 0,
            "next_try_s": None,
        }

    run(scenario, data=3)


def test_without_room_for_an_extra_engine_one_leaves_first() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.capacity = 2
        assert await watched(harness, upgrade(harness)) == (1, 2)
        assert harness.versions == [NEW] * 2

    run(scenario, data=2)


def test_a_single_engine_is_not_replaced_without_room_for_an_extra_one() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.capacity = 1
        assert await watched(harness, upgrade(harness)) == (1, 1)
        assert harness.versions == [OLD]
        described = (await harness.manager.describe())["upgrade"]
        assert described["phase"] == "failed" and "room for a second engine" in described["error"]

    run(scenario)


@pytest.mark.parametrize("capacity", [2, 1000])
def test_a_version_that_does_not_become_ready_is_rolled_back(capacity: int) -> None:
    """The operator sees the reason and may retry."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.broken, harness.placement.capacity = {NEW}, capacity
        least, _ = await watched(harness, upgrade(harness))
        assert least == (1 if capacity == 2 else 2)
        assert harness.versions == [OLD] * 2
        described = (await harness.manager.describe())["upgrade"]
        assert described["phase"] == "failed" and described["previous"] == NEW
        assert "its weights do not load" in described["error"]
        harness.placement.capacity = 1000
        await harness.upgrade("another")
        await harness.settle()
        assert harness.versions == ["3-another"] * 2 and harness.manager.upgrader.wanted.number == 3

    run(scenario, data=2)


def test_a_version_whose_later_engines_do_not_start_is_rolled_back_too() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.upgrade("other")
        await until(lambda: NEW in harness.versions)
        harness.placement.broken = {NEW}
        await harness.settle()
        assert harness.versions == [OLD] * 2
        assert harness.manager.upgrader.record.stage is UpgradeStage.FAILED

    run(scenario, data=2)


def test_an_upgrade_without_room_anywhere_is_refused() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.room = 1
        with pytest.raises(ScaleRefused, match="no room for 2 engines"):
            await harness.upgrade("other")
        harness.placement.room, harness.checkpoints.away = 1000, True
        with pytest.raises(ScaleRefused, match="nothing was changed"):
            await harness.upgrade("other")
        harness.checkpoints.away = False
        await asyncio.sleep(2 * START_S)
        assert harness.versions == [OLD] * 2

    run(scenario, data=2)


def test_the_next_manager_continues_an_upgrade() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.upgrade("other")
        await until(lambda: NEW in harness.versions)
        engines = set(harness.placement.processes)
        await harness.lose_manager()
        await harness.manager.start()
        assert engines & set(harness.placement.processes), "engines of both versions are adopted"
        await harness.settle()
        assert harness.versions == [NEW] * 3

    run(scenario, data=3)


def test_the_last_engine_of_a_version_stops_when_no_answer_needs_it() -> None:
    """The drain timeout does not apply to this engine, for any of its reports."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.needed = {OLD}
        await harness.upgrade("other")
        await until(lambda: harness.versions == [NEW])
        await asyncio.sleep(1000.0)
        assert len(harness.placement.processes) == 2
        harness.coordinator.reports[0] = busy(0)
        await asyncio.sleep(1.0)
        harness.coordinator.needed = {NEW}
        await asyncio.sleep(1000.0)
        assert len(harness.placement.processes) == 2
        harness.coordinator.reports.clear()
        await harness.settle()
        assert len(harness.placement.processes) == 1

    run(scenario)


def test_a_version_is_remembered_until_answers_can_report_that_they_need_it() -> None:
    """The last engine of the old version dies, and several versions are requested before the next
    report of an ingress arrives."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        (rank,) = harness.placement.alive
        harness.coordinator.reports[rank] = busy(rank)
        await harness.upgrade("other")
        await until(lambda: harness.versions == [NEW])
        harness.coordinator.reports.clear()
        harness.placement.kill_engine(rank)
        fleet = harness.manager._fleet
        await until(lambda: all(OLD not in each.versions for each in fleet.view().engines))
        for number in range(MAX_VERSIONS):
            await harness.upgrade(f"later{number}")
            await asyncio.sleep(0.1)
        harness.coordinator.needed = {OLD}
        await until(lambda: OLD in [each.version for each in harness.coordinator.roster.members])
        harness.coordinator.needed = set()
        await harness.settle()
        assert harness.versions == [f"{MAX_VERSIONS + 2}-later{MAX_VERSIONS - 1}"]

    run(scenario)


def test_an_engine_of_a_needed_version_is_started_again() -> None:
    """The last engine of the old version dies while an answer still needs it."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.needed = {OLD}
        await harness.upgrade("other")
        await until(lambda: harness.versions == [NEW])
        (rank,) = [m.rank for m in harness.coordinator.roster.members if m.version == OLD]
        dead = harness.placement.alive[rank].name
        harness.placement.kill_engine(rank)

        def is_again() -> bool:
            found = [m.rank for m in harness.coordinator.roster.members if m.version == OLD]
            alive = harness.placement.alive
            return any(rank in alive and alive[rank].name != dead for rank in found)

        await until(is_again)
        assert harness.versions[-1] == NEW
        harness.coordinator.needed = set()
        await harness.settle()
        assert harness.versions == [NEW] and len(harness.placement.processes) == 1

    run(scenario)


def test_a_redeployed_application_is_upgraded() -> None:
    """The cluster keeps serving. A configuration that does not become ready is rolled back."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.lose_manager()
        harness.config_hash = "other"
        harness.manager = harness.another()
        assert await watched(harness, harness.start()) == (2, 3)
        assert harness.versions == [NEW] * 2
        harness.placement.broken = {"3-third"}
        await harness.lose_manager()
        harness.config_hash = "third"
        harness.manager = harness.another()
        assert (await watched(harness, harness.start()))[0] == 2
        assert harness.versions == [NEW] * 2
        await harness.lose_manager()
        await harness.start()
        assert harness.manager.upgrader.record.stage is UpgradeStage.FAILED, "it is not tried again"

    run(scenario, data=2)


def test_a_configuration_that_never_served_is_replaced_outright() -> None:
    """The first deployment failed and is corrected."""

    async def scenario(harness: ManagerHarness) -> None:
        harness.placement.broken = {OLD}
        await harness.manager.start()
        await asyncio.sleep(3 * START_S)
        assert harness.active == []
        await harness.lose_manager()
        harness.config_hash = "other"
        harness.manager = harness.another()
        await harness.start()
        assert harness.versions == [NEW] * 2

    run(scenario, data=2)


@pytest.mark.parametrize("survivors", [0, 1])
def test_an_upgrade_replaces_a_version_that_no_longer_starts(survivors: int) -> None:
    """The weights of the old version are gone, and its engines have died."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.broken = {OLD}
        for rank in range(survivors, 2):
            harness.placement.kill_engine(rank)
        await asyncio.sleep(3 * START_S)
        assert harness.versions == [OLD] * survivors
        await harness.upgrade("other")
        await until(lambda: harness.versions == [NEW] * 2)
        await harness.settle()

    run(scenario, data=2)


def test_an_upgrade_in_place_continues_with_one_engine() -> None:
    """The operator reduces the target meanwhile, which frees room for the next engine."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.capacity = 2
        await harness.upgrade("other")
        await until(lambda: harness.manager.upgrader.record.in_place)
        await harness.manager.scale(1)
        await harness.settle()
        assert harness.versions == [NEW]

    run(scenario, data=2)


def test_an_engine_that_died_has_one_successor_though_answers_need_its_version() -> None:
    """The manager learns of the needed version before the resources of the dead engine are free."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        end = harness.placement.end

        async def end_slowly(handle: EngineHandle) -> None:
            await asyncio.sleep(START_S)
            await end(handle)

        harness.placement.end = end_slowly  # type: ignore[method-assign]
        harness.placement.kill_engine(0)
        await asyncio.sleep(1.0)
        harness.coordinator.needed = {OLD}
        await asyncio.sleep(START_S / 2)
        harness.placement.end = end  # type: ignore[method-assign]
        await harness.settle()
        assert harness.placement.ranks_of_event("start") == [[0], [0]]

    run(scenario)


def test_the_next_manager_waits_for_the_extra_engine() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.upgrade("other")
        await asyncio.sleep(START_S / 2)
        (extra,) = {name for name, p in harness.placement.processes.items() if p.ready is None}
        await harness.lose_manager()
        await harness.manager.start()
        await harness.settle()
        assert harness.versions == [NEW] * 2 and extra in harness.placement.processes

    run(scenario, data=2)
