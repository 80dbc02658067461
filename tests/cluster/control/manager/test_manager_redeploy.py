"""Applications that are redeployed or deleted, and managers that no longer lead."""

from __future__ import annotations

import asyncio

import pytest

from swell.cluster.control.manager import ClusterManager
from swell.cluster.control.plan.checkpoint import ClusterCheckpoint
from swell.cluster.control.plan.control_state import ScaleRefused
from swell.configs.schema import load
from swell.coordinator.manager_state import DesiredState
from tests.cluster.control.fake_manager import (
    CHECKPOINT_S,
    FakeCheckpointStore,
    ManagerHarness,
    busy,
    run,
)
from tests.support.paths import NANO


def test_engines_of_another_configuration_are_replaced() -> None:
    """The new manager starts before the old one has stopped. The target requested from the old one
    is dropped."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.manager.scale(3)
        await harness.settle()
        old, engines = harness.manager, set(harness.placement.processes)
        harness.redeploy("another", data=2)
        harness.manager = harness.another()
        await harness.start()
        assert not engines & set(harness.placement.processes) and harness.active == [0, 1]
        assert harness.manager.target == 2, "the target of the other configuration is void"
        await old.stop()
        assert harness.active == [0, 1]

    run(scenario)


def test_another_number_of_engines_in_the_configuration_is_the_new_target() -> None:
    """Running engines stay. A requested target is dropped, but a pause is kept."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.manager.scale(2)
        await harness.settle()
        await harness.manager.pause()
        await harness.manager.save()
        engines = set(harness.placement.processes)
        await harness.lose_manager()
        harness.configure(parallel={"data": 3})
        await harness.start()
        assert (harness.manager.target, harness.manager.pause_requested) == (3, True)
        assert engines < set(harness.placement.processes) and len(harness.placement.processes) == 3

    run(scenario)


def test_a_target_beyond_the_limits_of_the_configuration_is_not_taken_over() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.manager.scale(4)
        await harness.settle()
        await harness.lose_manager()
        harness.configure(cluster={"max_engines": 2})
        await harness.start()
        assert harness.manager.target == 2 and harness.active == [0, 1]

    run(scenario)


async def scale(manager: ClusterManager) -> None:
    await manager.scale(3)


async def drain(manager: ClusterManager) -> None:
    manager.drain(1)


@pytest.mark.parametrize("request_change", [scale, drain])
def test_a_manager_that_no_longer_leads_refuses_changes(request_change) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        first, harness.manager = harness.manager, harness.another()
        await harness.manager.start()
        await request_change(first)
        with pytest.raises(ScaleRefused, match="another manager"):
            await first.save()
        await harness.settle()
        assert harness.manager.target == 2 and harness.active == [0, 1]

    run(scenario, data=2)


def test_a_manager_that_is_stopped_during_its_takeover_leaves_nothing() -> None:
    """The application is deleted during the takeover, and no other manager follows."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.lose_manager()
        starting = asyncio.create_task(harness.manager.start())
        await asyncio.sleep(CHECKPOINT_S / 2)
        await harness.manager.stop()
        await starting
        assert harness.placement.processes == {} and harness.placement.events[-1] == ("close", [])

    run(scenario, data=2)


def test_an_old_manager_starts_no_engines_next_to_the_new_one() -> None:
    """The old manager sees its engines die when the new one stops them. Its coordinator cannot tell
    it why, because that was stopped too."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        old, engine = harness.manager, harness.placement.alive[0]
        other = FakeCheckpointStore("another", harness.checkpoints.page)
        await other.claim("other", 0)
        await other.write(ClusterCheckpoint(DesiredState("other", 1), "another"))
        harness.placement.kill_engine(0)
        await asyncio.sleep(100)
        assert harness.placement.ranks_of_event("start") == [[0]]
        await old.stop()
        assert ("close", []) not in harness.placement.events
        assert (await harness.checkpoints.read()).desired.owner == "other"
        await harness.placement.end(engine)

    run(scenario)


def test_a_manager_that_is_replaced_while_it_drains_stops_no_engine() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[0] = busy(0)
        stopping = asyncio.create_task(harness.manager.stop())
        await asyncio.sleep(5)
        harness.manager = harness.another()
        await harness.manager.start()
        await stopping
        assert harness.active == [0] and ("close", []) not in harness.placement.events
        harness.coordinator.reports.clear()

    run(scenario)


async def upgrade(manager: ClusterManager) -> None:
    await manager.upgrade("another", load(str(NANO)))


async def pause(manager: ClusterManager) -> None:
    await manager.pause()


async def resume(manager: ClusterManager) -> None:
    await manager.resume()


@pytest.mark.parametrize("request_change", [scale, drain, upgrade, pause, resume])
def test_a_manager_that_ends_the_cluster_refuses_changes_and_leaves_nothing(request_change) -> None:
    """The change is requested while the engines finish their requests."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[0] = busy(0)
        stopping = asyncio.create_task(harness.manager.stop())
        await asyncio.sleep(5)
        with pytest.raises(ScaleRefused, match="shutting down"):
            await request_change(harness.manager)
        harness.coordinator.reports.clear()
        await stopping
        await asyncio.sleep(100)
        assert harness.placement.processes == {} and harness.placement.events[-1] == ("close", [])
        assert harness.manager.target == 2

    run(scenario, data=2)
