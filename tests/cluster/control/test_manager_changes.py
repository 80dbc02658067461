"""A new target replaces the old one, whatever is under way."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.control.manager import ScaleRefused
from swell.coordinator.roster import MemberState
from tests.cluster.control.lives import NOTES_S, START_S, World, busy, run, transient

# -------------------------------------------------------------------------------- prepare


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_starts_that_are_not_wanted_any_more_are_ended_at_once(engines) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.manager.scale(4)
        await asyncio.sleep(START_S / 2)
        world.manager.scale(engines)
        await asyncio.sleep(0.1)
        assert len(world.placement.groups) == engines
        assert world.manager.target == engines
        assert world.manager.phase == ("idle" if engines == 1 else "prepare")
        await asyncio.sleep(START_S)
        assert world.active == list(range(engines)) and world.manager.phase == "idle"
        assert world.placement.did("start") == [[0], [1], [2], [3]]

    run(scenario)


def test_a_start_that_has_not_begun_does_not_begin() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.manager.scale(3)
        await asyncio.sleep(NOTES_S / 2)
        world.manager.scale(1)
        await asyncio.sleep(2 * START_S)
        assert world.active == [0] and world.placement.did("start") == [[0]]

    run(scenario)


@pytest.mark.parametrize("second", [3, 4, 5])
def test_a_change_that_replaced_another_and_fails_goes_back_to_what_was_whole(second) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.placement.always = transient("no room")
        world.manager.scale(4)
        await asyncio.sleep(START_S / 2)
        world.manager.scale(second)
        await world.settle()
        assert (world.manager.phase, world.manager.target) == ("failed", 2)
        assert world.active == [0, 1] and "no room" in (world.manager.error or "")

    run(scenario, data=2)


def test_a_larger_target_during_a_start_begins_at_once() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.manager.scale(2)
        await asyncio.sleep(START_S / 2)
        world.manager.scale(4)
        await asyncio.sleep(0.1)
        assert len(world.placement.groups) == 4
        await world.settle()
        assert world.active == [0, 1, 2, 3]

    run(scenario)


@pytest.mark.parametrize("engines", [1, 2])
def test_one_that_is_ready_and_waits_for_others_can_be_called_off_too(engines) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.placement.slow_s = {2: 500.0}
        world.manager.scale(3)
        await asyncio.sleep(2 * START_S)
        assert sorted(world.placement.alive) == [0, 1] and world.active == [0]
        world.manager.scale(engines)
        await asyncio.sleep(0.1)
        assert world.active == list(range(engines)) and len(world.placement.groups) == engines
        assert world.manager.phase == "idle"

    run(scenario)


def test_a_failure_of_a_start_that_was_called_off_is_none() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.manager.scale(3)
        await asyncio.sleep(START_S / 2)
        world.placement.always = AssertionError("it was not wanted")  # type: ignore[assignment]
        world.manager.scale(1)
        await world.settle()
        assert (world.manager.phase, world.manager.error) == ("idle", None)

    run(scenario)


# -------------------------------------------------------------------------------- commit


def test_what_is_asked_during_a_commit_is_done_when_it_is_over() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.coordinator.group_s = 20
        world.manager.scale(3)
        await asyncio.sleep(START_S + 5)
        assert world.manager.phase == "commit"
        world.manager.scale(1)
        assert (world.manager.target, world.manager.phase) == (1, "commit")
        await asyncio.sleep(5)
        assert world.active == [0] and world.manager.phase == "commit"
        await world.settle()
        assert world.active == [0] and world.coordinator.roster.ranks == [0]

    run(scenario)


# -------------------------------------------------------------------------------- drain


def test_an_engine_that_has_not_left_is_kept() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        engine = world.placement.alive[1]
        world.coordinator.reports[1] = busy(1)
        world.manager.scale(1, 3600.0)
        await asyncio.sleep(60)
        assert world.active == [0] and world.manager.phase == "drain"
        world.manager.scale(2)
        await asyncio.sleep(0.1)
        assert world.active == [0, 1] and world.placement.alive[1] is engine
        assert world.manager.phase == "idle"
        await asyncio.sleep(10_000)
        assert world.placement.alive[1] is engine, "its old time is over, and it stays"
        assert world.placement.did("start") == [[0], [1]] or len(world.placement.groups) == 2

    run(scenario, data=2)


def test_one_that_was_named_is_not_kept() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.coordinator.reports[0] = busy(0)
        world.manager.drain(0)
        await asyncio.sleep(1)
        world.manager.scale(2)
        await asyncio.sleep(2 * START_S)
        assert world.active == [1, 2]
        world.coordinator.reports.clear()
        await world.settle()
        assert world.active == [1, 2] and 0 not in world.placement.alive

    run(scenario, data=2, drain_timeout_s=3600)


def test_to_ask_again_with_less_time_is_to_hurry() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.coordinator.reports[1] = busy(1)
        world.manager.scale(1, 3600.0)
        await asyncio.sleep(60)
        assert 1 in world.placement.alive
        world.manager.scale(1, 0.0)
        await world.settle()
        assert list(world.placement.alive) == [0]

    run(scenario, data=2)


def test_one_long_drain_holds_up_no_other() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.coordinator.reports.update({1: busy(1), 2: busy(2)})
        world.manager.scale(2, 3600.0)
        await asyncio.sleep(1)
        del world.coordinator.reports[1]
        world.manager.drain(1)
        await asyncio.sleep(5)
        assert sorted(world.placement.alive) == [0, 2] and world.active == [0]

    run(scenario, data=3)


# -------------------------------------------------------------------------------- pause


def test_a_paused_engine_leaves_when_its_time_is_over() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.coordinator.reports[1] = busy(1)
        await world.manager.pause()
        world.manager.scale(1, 30.0)
        await asyncio.sleep(20)
        assert 1 in world.placement.alive
        await world.settle()
        assert list(world.placement.alive) == [0] and world.coordinator.state == "paused"

    run(scenario, data=2)


def test_a_long_drain_while_paused_can_be_taken_back() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.coordinator.reports[1] = busy(1)
        world.manager.scale(1, 3600.0)
        await world.manager.pause()
        await asyncio.sleep(60)
        world.manager.scale(3)
        await world.settle()
        assert world.active == [0, 1, 2] and world.coordinator.state == "paused"
        await world.manager.resume()
        await world.settle()
        assert world.coordinator.state == "serving"

    run(scenario, data=2)


@pytest.mark.parametrize("seconds", [0.0, START_S / 2, START_S + 5])
def test_a_pause_may_begin_during_a_change(seconds) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.coordinator.group_s = 10
        world.manager.scale(2)
        await asyncio.sleep(seconds)
        await world.manager.pause()
        await world.settle()
        assert world.active == [0, 1] and world.coordinator.state == "paused"
        await world.manager.resume()

    run(scenario)


# -------------------------------------------------------------------------------- any order

_STEP = st.one_of(
    st.tuples(st.just("scale"), st.integers(1, 4)),
    st.tuples(st.just("scale now"), st.integers(1, 4)),
    st.tuples(st.just("drain"), st.integers(0, 4)),
    st.tuples(st.just("die"), st.integers(0, 4)),
    st.tuples(st.just("stop"), st.integers(0, 4)),
    st.tuples(st.just("busy"), st.integers(0, 4)),
    st.tuples(st.just("pause"), st.just(0)),
    st.tuples(st.just("resume"), st.just(0)),
    st.tuples(st.just("lose manager"), st.just(0)),
    st.tuples(st.just("lose both"), st.just(0)),
)
_PAUSES_S = st.sampled_from([0.0, 0.05, 1.0, START_S / 2, START_S, START_S + 3])


async def step(world: World, what: str, number: int) -> int | None:
    """Returns the target that was accepted, if it asked for one."""
    manager, placement, coordinator = world.manager, world.placement, world.coordinator
    match what:
        case "scale" | "scale now":
            manager.scale(number, 0.0 if what == "scale now" else None)
            return number
        case "drain":
            wanted = manager.target - 1
            try:
                manager.drain(number)
            except ScaleRefused:
                return None
            return wanted
        case "die" if number in placement.alive:
            placement.die(number)
        case "stop" if coordinator.roster.find(number) is not None:
            coordinator.find_stopped(number)
        case "busy":
            coordinator.reports[number] = busy(number)
        case "pause":
            await manager.pause()
        case "resume":
            await manager.resume()
        case "lose manager" | "lose both":
            await manager.save()
            await world.lose_manager()
            if what == "lose both":
                coordinator.restart(*placement.alive)
            await world.manager.start()
    return None


@settings(max_examples=120, derandomize=True, deadline=None, database=None)
@given(st.lists(st.tuples(_STEP, _PAUSES_S), max_size=12), st.sampled_from([0.0, 3.0]))
def test_any_order_of_changes_and_deaths_ends_with_what_was_asked_last(steps, group_s) -> None:
    """Nothing is left over: no process, no placement group, no rank that nobody wants."""

    async def scenario(world: World) -> None:
        world.coordinator.group_s = group_s
        await world.manager.start()
        wanted = 2
        for (what, number), pause_s in steps:
            wanted = await step(world, what, number) or wanted
            await asyncio.sleep(pause_s)
        assert world.manager.target == wanted
        world.coordinator.reports.clear()
        await asyncio.sleep(400)
        await world.settle()
        assert len(world.active) == len(world.coordinator.roster.members) == wanted
        assert len(world.placement.groups) == len(world.placement.processes) == wanted
        assert all(m.state is MemberState.ACTIVE for m in world.coordinator.roster.members)
        assert (world.manager.phase, world.manager.error) == ("idle", None)

    run(scenario, data=2)
