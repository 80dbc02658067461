"""The lives of engines as people want them: growing, shrinking, asking."""

from __future__ import annotations

import asyncio

import pytest

from swell.cluster.control.manager import ScaleRefused
from swell.coordinator.wire import EngineReport
from tests.cluster.control.lives import START_S, World, busy, run

# -------------------------------------------------------------------------------- growing


def test_engines_start_beside_each_other_and_join_in_one_epoch() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        assert world.active == [0, 1, 2] and world.coordinator.roster.epoch == 1
        assert world.manager.phase == "idle" and world.manager.error is None

    world = run(scenario, data=3)
    assert world.placement.most_starting == 3
    assert world.placement.events[0] == ("open", [])


def test_scale_up_keeps_those_that_serve() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        first = world.placement.alive[0]
        world.manager.scale(3)
        assert world.manager.phase == "prepare"
        await asyncio.sleep(START_S / 2)
        assert world.active == [0], "newcomers joined before they were ready"
        await world.settle()
        assert world.active == [0, 1, 2] and world.placement.alive[0] is first
        assert world.manager.target == 3 and world.manager.phase == "idle"

    run(scenario)


def test_a_newcomer_takes_the_lowest_free_rank() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.manager.drain(1)
        await world.settle()
        assert world.active == [0, 2]
        world.manager.scale(4)
        await world.settle()
        assert world.active == [0, 1, 2, 3]

    run(scenario, data=3)


# -------------------------------------------------------------------------------- shrinking


def test_scale_down_leaves_then_removes_then_ends_the_highest_ranks() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.placement.events.clear()
        world.manager.scale(1)
        assert world.manager.phase == "drain"
        await world.settle()
        assert world.active == [0] and list(world.placement.alive) == [0]
        names = [name for name, _ in world.placement.events]
        assert names == ["leave", "part", "end", "end"]
        assert world.placement.did("leave") == world.placement.did("part") == [[1, 2]]

    run(scenario, data=3)


def test_a_leaving_engine_finishes_its_requests_first() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.coordinator.reports[1] = busy(1)
        world.manager.scale(1)
        await asyncio.sleep(20)
        assert world.active == [0] and 1 in world.coordinator.roster.ranks
        assert 1 in world.placement.alive and world.manager.phase == "drain"
        world.coordinator.reports[1] = EngineReport(1, waiting=1)
        await asyncio.sleep(5)
        assert 1 in world.placement.alive, "a waiting request is one, too"
        world.coordinator.reports[1] = EngineReport(1)
        await world.settle()
        assert 1 not in world.placement.alive

    run(scenario, data=2, drain_timeout_s=30)


def test_one_quiet_look_is_not_enough() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.coordinator.reports[1] = busy(1)
        world.manager.scale(1)
        await asyncio.sleep(1.25)
        for running in (0, 1) * 4:  # what each look sees
            world.coordinator.reports[1] = EngineReport(1, running=running)
            await asyncio.sleep(0.5)
        assert 1 in world.placement.alive

    run(scenario, data=2, load_report_s=0.25)


@pytest.mark.parametrize(("asked", "seconds"), [(None, 30), (5.0, 5)])
def test_the_drain_time_is_a_limit(asked, seconds) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.coordinator.reports[1] = busy(1)
        world.manager.scale(1, asked)
        await asyncio.sleep(seconds - 1)
        assert 1 in world.placement.alive
        await asyncio.sleep(2)
        assert 1 not in world.placement.alive
        await world.settle()
        assert world.manager.phase == "idle"

    run(scenario, data=2, drain_timeout_s=30)


def test_drain_takes_the_engine_that_was_named() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.manager.drain(0)
        await world.settle()
        assert world.active == [1, 2] and world.manager.target == 2
        with pytest.raises(ScaleRefused, match=r"no engine 0; engines: \[1, 2\]"):
            world.manager.drain(0)

    run(scenario, data=3)


def test_a_drain_that_is_refused_marks_nobody() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        with pytest.raises(ScaleRefused, match="min_engines=2"):
            world.manager.drain(0)
        world.manager.scale(3)
        await world.settle()
        world.manager.scale(2)
        await world.settle()
        assert world.active == [0, 1]

    run(scenario, data=2, min_engines=2)


# -------------------------------------------------------------------------------- refusals


def test_a_target_without_room_is_refused_and_nothing_changes() -> None:
    async def scenario(world: World) -> None:
        world.placement.room = 2
        await world.start()
        world.placement.events.clear()
        with pytest.raises(ScaleRefused, match="no room for 3 engines"):
            world.manager.scale(3)
        assert (world.manager.target, world.manager.phase) == (2, "idle")
        await world.settle()
        assert world.placement.events == []
        world.placement.room = 0
        world.manager.scale(1)
        await world.settle()
        assert world.active == [0], "who shrinks needs no room"

    run(scenario, data=2)


@pytest.mark.parametrize("engines", [0, -1, 5])
def test_a_target_out_of_range_is_refused(engines) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        with pytest.raises(ScaleRefused, match=rf"={engines} .*=1 .*max_engines=4"):
            world.manager.scale(engines)
        assert (world.manager.target, world.manager.phase) == (2, "idle")
        await world.settle()
        assert world.active == [0, 1]

    run(scenario, data=2, max_engines=4)


# -------------------------------------------------------------------------------- describing


def test_describe_holds_what_the_contract_names() -> None:
    async def scenario(world: World) -> None:
        await world.manager.start()
        await asyncio.sleep(START_S / 2)
        described = await world.manager.describe()
        assert described["state"] == "starting"
        assert [(e["rank"], e["state"]) for e in described["engines"]] == [
            (0, "starting"),
            (1, "starting"),
        ]
        text, failed = await world.manager.waiting_for()
        assert "engine 0: " in text and "engine 1: " in text and not failed
        await world.settle()
        world.coordinator.reports[1] = EngineReport(
            1, epoch=5, running=2, waiting=3, kv_usage=0.5, steps=9, wave=4, repairs=1
        )
        described = await world.manager.describe()
        assert described["engines"][1] == {
            "rank": 1,
            "state": "active",
            "pid": 1001,
            "node": "node",
            "running": 2,
            "waiting": 3,
            "kv_usage": 0.5,
            "steps": 9,
            "epoch": 5,
            "wave": 4,
            "repairs": 1,
            "workers": [{"rank": 0, "tensor": 0, "pipeline": 0, "pid": 2001}],
        }
        assert world.placement.did("refresh") == [[1]], "its workers are others now"
        await world.manager.describe()
        assert world.placement.did("refresh") == [[1]], "asked once for each repair"
        del described["engines"]
        assert described == {
            "epoch": 1,
            "wave": 0,
            "state": "serving",
            "target": 2,
            "coordinator": {"pid": 77},
            "rescale": {"phase": "idle", "error": None, "failures": 0, "next_try_s": None},
        }

    run(scenario, data=2)


def test_describe_says_when_the_cluster_changes() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.coordinator.reports[1] = busy(1)
        world.manager.scale(1)
        await asyncio.sleep(1)
        described = await world.manager.describe()
        assert described["state"] == "changing"
        assert [e["state"] for e in described["engines"]] == ["active", "leaving"]

    run(scenario, data=2)


@pytest.mark.parametrize("trouble", ["silent", "gone"])
def test_describe_tells_what_was_known_while_the_coordinator_is_away(trouble) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        before = await world.manager.describe()
        setattr(world.coordinator, trouble, True)
        assert await world.manager.describe() == before
        setattr(world.coordinator, trouble, False)

    run(scenario, data=2)


# -------------------------------------------------------------------------------- pausing


def test_a_pause_lasts_until_it_is_ended() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        await world.manager.pause()
        await asyncio.sleep(100)
        assert world.coordinator.state == "paused"
        assert (await world.manager.describe())["state"] == "paused"
        await world.manager.resume()
        await asyncio.sleep(100)
        assert (await world.manager.describe())["state"] == "serving"

    run(scenario)
