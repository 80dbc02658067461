"""An application that is deployed again, or deleted, and managers that rule no more."""

from __future__ import annotations

import asyncio

import pytest

from swell.cluster.control.manager import ScaleRefused
from swell.cluster.control.notes import ClusterNote
from tests.cluster.control.lives import NOTES_S, FakeNotes, World, busy, run


def test_engines_of_another_configuration_are_replaced() -> None:
    """The new manager comes before the old one has gone, and another size was asked of that one."""

    async def scenario(world: World) -> None:
        await world.start()
        world.manager.scale(3)
        await world.settle()
        old, engines = world.manager, set(world.placement.processes)
        world.redeploy("another", data=2)
        world.manager = world.another()
        await world.start()
        assert not engines & set(world.placement.processes) and world.active == [0, 1]
        assert world.manager.target == 2, "what was asked of the other configuration is void"
        await old.stop()
        assert world.active == [0, 1]

    run(scenario)


def test_another_number_of_engines_in_the_configuration_is_the_new_target() -> None:
    """Engines that are there stay; what was asked of the old number is void, a pause is not."""

    async def scenario(world: World) -> None:
        await world.start()
        world.manager.scale(2)
        await world.settle()
        await world.manager.pause()
        await world.manager.save()
        engines = set(world.placement.processes)
        await world.lose_manager()
        world.configure(parallel={"data": 3})
        await world.start()
        assert (world.manager.target, world.manager.held) == (3, True)
        assert engines < set(world.placement.processes) and len(world.placement.processes) == 3

    run(scenario)


def test_a_target_beyond_the_limits_of_the_configuration_is_not_taken_over() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.manager.scale(4)
        await world.settle()
        await world.lose_manager()
        world.configure(cluster={"max_engines": 2})
        await world.start()
        assert world.manager.target == 2 and world.active == [0, 1]

    run(scenario)


@pytest.mark.parametrize("change", ["scale", "drain", "pause", "resume"])
def test_a_manager_that_rules_no_more_accepts_nothing(change) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        first, world.manager = world.manager, world.another()
        await world.manager.start()
        match change:
            case "scale":
                first.scale(3)
            case "drain":
                first.drain(1)
            case "pause":
                await first.pause()
            case _:
                await first.resume()
        with pytest.raises(ScaleRefused, match="another manager"):
            await first.save()
        await world.settle()
        assert world.manager.target == 2 and world.active == [0, 1]

    run(scenario, data=2)


def test_a_manager_that_is_to_end_while_it_takes_over_leaves_nothing() -> None:
    """The application is deleted meanwhile, and nobody comes after it."""

    async def scenario(world: World) -> None:
        await world.start()
        await world.lose_manager()
        starting = asyncio.create_task(world.manager.start())
        await asyncio.sleep(NOTES_S / 2)
        await world.manager.stop()
        await starting
        assert world.placement.processes == {} and world.placement.events[-1] == ("close", [])

    run(scenario, data=2)


def test_an_old_manager_starts_nothing_beside_the_new_one() -> None:
    """It sees its engines die as the other one ends them; it cannot hear of that from its
    coordinator, which was ended too."""

    async def scenario(world: World) -> None:
        await world.start()
        old, engine = world.manager, world.placement.alive[0]
        await FakeNotes("another", world.notes.page).write(ClusterNote("other", "another", 1))
        world.placement.die(0)
        await asyncio.sleep(100)
        assert world.placement.did("start") == [[0]]
        await old.stop()
        assert ("close", []) not in world.placement.events
        assert (await world.notes.read()).owner == "other"
        await world.placement.end(engine)

    run(scenario)


def test_a_manager_that_another_follows_while_it_drains_ends_nothing() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.coordinator.reports[0] = busy(0)
        stopping = asyncio.create_task(world.manager.stop())
        await asyncio.sleep(5)
        world.manager = world.another()
        await world.manager.start()
        await stopping
        assert world.active == [0] and ("close", []) not in world.placement.events
        world.coordinator.reports.clear()

    run(scenario)
