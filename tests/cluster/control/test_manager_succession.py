"""What a manager finds that comes after another, and what a coordinator is told that comes back."""

from __future__ import annotations

import asyncio

import pytest

from swell.coordinator import roster
from swell.coordinator.channel import ChannelAddress
from swell.coordinator.roster import Member, Roster
from tests.cluster.control.lives import START_S, World, busy, run, transient

# -------------------------------------------------------------------------------- managers


def test_a_new_manager_adopts_what_serves() -> None:
    async def scenario(world: World) -> None:
        members = [world.placement.there(rank) for rank in (0, 2, 3)]
        world.coordinator.roster = before = roster.join(Roster(), members)
        await world.start()
        assert world.coordinator.roster is before and world.placement.did("start") == []
        assert (world.manager.target, world.manager.phase) == (3, "idle")
        world.placement.die(2)
        await world.settle()
        assert world.active == [0, 1, 3]
        world.manager.scale(1)
        await world.settle()
        assert world.active == [0]

    run(scenario, data=1)


def test_a_new_manager_goes_on_with_a_drain() -> None:
    """The old one was lost while rank 1 was leaving: it leaves, and does not come back."""

    async def scenario(world: World) -> None:
        members = [world.placement.there(rank) for rank in (0, 1)]
        world.coordinator.roster = roster.leave(roster.join(Roster(), members), [1])
        await world.start()
        assert world.active == world.coordinator.roster.ranks == [0]
        assert world.manager.target == 1 and list(world.placement.alive) == [0]

    run(scenario)


def test_a_new_manager_gives_a_leaving_engine_its_time() -> None:
    async def scenario(world: World) -> None:
        members = [world.placement.there(rank) for rank in (0, 1)]
        world.coordinator.roster = roster.leave(roster.join(Roster(), members), [1])
        world.coordinator.reports[1] = busy(1)
        await world.manager.start()
        await asyncio.sleep(20)
        assert 1 in world.placement.alive
        await world.settle()
        assert list(world.placement.alive) == [0]

    run(scenario, drain_timeout_s=30)


def test_stop_ends_engines_that_are_still_starting() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.manager.scale(3)
        await asyncio.sleep(START_S / 2)

    world = run(scenario)
    assert world.placement.starting == 0 and world.placement.events[-1] == ("close", [])


@pytest.mark.parametrize("shrinks", [False, True])
def test_a_manager_that_is_lost_during_a_change_leaves_it_to_the_next(shrinks) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        if shrinks:
            world.coordinator.reports[1] = busy(1)
        world.manager.scale(1 if shrinks else 3)
        await asyncio.sleep(START_S / 2)
        await world.lose_manager()
        world.coordinator.reports.clear()
        await world.start()
        assert world.active == ([0] if shrinks else [0, 1, 2])
        assert (world.manager.phase, world.manager.error) == ("idle", None)

    run(scenario, data=2)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_manager_that_comes_back_leaves_all_to_the_one_that_rules(stopped) -> None:
    """`stopped`: it had no time to see that there is another, and is asked to end."""

    async def scenario(world: World) -> None:
        await world.start()
        first, world.manager = world.manager, world.another()
        if stopped:
            await first._fleet.rest()
        await world.start()
        world.placement.events.clear()
        if not stopped:
            first.target = 5
            first._wake.set()
            await world.settle()
        await first.stop()
        assert world.active == [0, 1] and world.placement.events == []

    run(scenario, data=2)


def test_a_new_manager_keeps_the_pause() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        await world.manager.pause()
        await asyncio.sleep(1)
        await world.lose_manager()
        await world.start()
        await asyncio.sleep(100)
        assert world.manager.held and world.coordinator.state == "paused"

    run(scenario)


# -------------------------------------------------------------------------------- together


@pytest.mark.parametrize("coordinator", [False, True])
@pytest.mark.parametrize("dead", [[0], [1, 2], [0, 1, 2]])
def test_engines_and_manager_die_together(dead, coordinator) -> None:
    """What the dead engines had reserved is given back, and as many are there again as were asked
    for, though nobody who knew how many has lived."""

    async def scenario(world: World) -> None:
        await world.start()
        world.manager.scale(3)
        await world.settle()
        world.placement.capacity = 3
        await world.lose_manager()
        for rank in dead:
            world.placement.die(rank)
        if coordinator:
            world.coordinator.restart(*sorted({0, 1, 2} - set(dead)))
        await world.start()
        assert world.active == [0, 1, 2] and world.manager.target == 3
        assert (world.manager.phase, world.manager.error) == ("idle", None)
        assert len(world.placement.groups) == 3

    run(scenario)


@pytest.mark.parametrize("after_s", [START_S / 2, START_S + 5])
def test_an_engine_that_loads_or_waits_to_join_is_adopted(after_s) -> None:
    """The manager dies while a newcomer loads, or while its group forms."""

    async def scenario(world: World) -> None:
        await world.start()
        world.coordinator.group_s = 10.0
        world.manager.scale(2)
        await asyncio.sleep(after_s)
        await world.lose_manager()
        before = set(world.placement.processes)
        await world.manager.start()
        await asyncio.sleep(START_S + 15)
        assert set(world.placement.processes) == before and len(before) == 2
        assert world.active == [0, 1] and world.manager.phase == "idle"
        assert world.placement.did("stray") == []

    run(scenario)


def test_of_two_engines_of_one_rank_the_one_that_serves_is_kept() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        engine = world.placement.alive[0].name
        world.placement.place(world.placement.plan(0), 1e6)
        await world.lose_manager()
        await world.start()
        assert set(world.placement.processes) == {engine} and world.active == [0]

    run(scenario)


def test_a_target_that_was_given_up_for_another_is_forgotten() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.placement.failures = {1: [transient()]}
        world.manager.scale(2)
        await world.settle()
        await world.lose_manager()
        await world.start()
        assert world.active == [0] and world.manager.target == 1

    run(scenario)


def test_notes_that_cannot_be_read_stop_nothing() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.notes.away = True
        world.placement.die(0)
        await asyncio.sleep(1)
        world.manager.scale(2)
        await world.settle()
        assert world.active == [0, 1]
        world.notes.away = False
        await world.manager.save()
        assert world.notes.page[0].target == 2

    run(scenario)


# -------------------------------------------------------------------------------- coordinators


def test_an_engine_that_a_restarted_coordinator_does_not_know_joins_again() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        engines = dict(world.placement.alive)
        world.coordinator.restart(0, 2)
        await world.settle()
        assert world.active == [0, 1, 2] and world.placement.alive == engines

    run(scenario, data=3)


def test_an_engine_that_it_does_not_know_and_that_is_silent_is_replaced() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        engine = world.placement.alive[1]
        world.placement.hung.add(1)
        world.coordinator.restart(0)
        await world.settle()
        assert world.active == [0, 1] and world.placement.alive[1] is not engine
        assert world.placement.did("kill") == [[1]]

    run(scenario, data=2)


def test_an_engine_goes_on_leaving_after_a_restart_of_the_coordinator() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.coordinator.reports[1] = busy(1)
        world.manager.scale(1)
        await asyncio.sleep(1)
        world.coordinator.restart(0, 1)
        await asyncio.sleep(1)
        assert world.active == [0] and world.coordinator.roster.ranks == [0, 1]
        world.coordinator.reports.clear()
        await world.settle()
        assert world.coordinator.roster.ranks == [0]

    run(scenario, data=2)


def test_an_engine_that_was_marked_as_leaving_too_late_is_kept() -> None:
    """Calls to the coordinator may overtake each other."""

    async def scenario(world: World) -> None:
        await world.start()
        await world.coordinator.leave([1])
        await asyncio.sleep(1)
        assert world.active == [0, 1]

    run(scenario, data=2)


def test_a_restarted_coordinator_is_told_what_is_wanted() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        await world.manager.pause()
        await asyncio.sleep(1)
        world.coordinator.restart(0)
        await asyncio.sleep(10)
        assert world.coordinator.state == "paused"
        assert (world.coordinator.kept.target, world.coordinator.kept.held) == (1, True)

    run(scenario)


def test_a_member_that_nobody_placed_is_taken_out() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        await world.coordinator.join([Member(7, ChannelAddress("m", "i", "t"))])
        await asyncio.sleep(1)
        assert world.coordinator.roster.ranks == [0]

    run(scenario)
