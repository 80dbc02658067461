"""A scale-up without room waits for it, reports so, and is cancelled if the target decreases."""

from __future__ import annotations

import asyncio

import pytest

from swell.cluster.control.engines.engine_handle import NoRoom, StartFailed
from swell.coordinator.wire import ClusterView, EngineReport
from tests.cluster.control.engines.test_placement import (
    VERSION,
    FakeCoordinator,
    Table,
    made,
    ready_answer,
)
from tests.cluster.control.fake_manager import START_S, ManagerHarness, run

# -------------------------------------------------------------------------------- one engine


@pytest.mark.parametrize("enabled", [True, False])
def test_an_engine_waits_for_room_where_hosts_may_join(enabled: bool) -> None:
    async def scenario() -> None:
        table = Table()
        ours = made(FakeCoordinator(), table, **{"autoscaling.add_nodes": enabled})
        table.has_room, table.room_after = False, 3 if enabled else None
        reasons: list[str | None] = []
        handle = ours.plan(0, VERSION)

        def note() -> None:
            reasons.append(handle.waits_for_room)

        table.created = ready_answer(0, 1)
        if not enabled:
            with pytest.raises(StartFailed, match="no room for engine 0"):
                await ours.start(handle, note)
            return
        await ours.start(handle, note)
        assert reasons[0] is not None and "it needs" in reasons[0]
        assert reasons[1:] == [None], "said once, and taken back"
        assert len(table.created_groups) == 1, "the group that Ray sees is never withdrawn"

    asyncio.run(scenario())


def test_an_engine_for_unfinished_answers_waits_for_the_room_of_another_one() -> None:
    """This holds even if no host may join the cluster. The wait lasts no longer than the answers
    do."""

    async def scenario() -> None:
        table = Table()
        ours = made(FakeCoordinator(), table, **{"cluster.start_timeout_s": 0.2})
        table.has_room, table.room_after, table.created = False, 3, ready_answer(0, 1)
        handle, late = ours.plan(0, VERSION), ours.plan(1, VERSION)
        handle.for_answers = late.for_answers = True
        reasons: list[str | None] = []

        def note() -> None:
            reasons.append(handle.waits_for_room)

        await ours.start(handle, note)
        assert reasons[0] is not None and reasons[-1] is None
        table.room_after = 10**9
        with pytest.raises(NoRoom, match="no room for engine 1"):
            await ours.start(late, note)

    asyncio.run(scenario())


def test_targets_beyond_the_hosts_are_refused_unless_hosts_may_join() -> None:
    async def scenario() -> None:
        table = Table()
        table.nodes = [{"CPU": 0.0}]
        assert "no room" in (await made(FakeCoordinator(), table).refusal(VERSION, 3) or "")
        joining = made(FakeCoordinator(), table, **{"autoscaling.add_nodes": True})
        assert await joining.refusal(VERSION, 3) is None

    asyncio.run(scenario())


# -------------------------------------------------------------------------------- the manager


def waiting(harness: ManagerHarness, capacity: int) -> None:
    harness.placement.capacity, harness.placement.waits_for_room = capacity, True


def test_a_growth_without_room_is_pending_and_its_state_is_reported() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        waiting(harness, 2)
        await harness.manager.scale(3)
        await asyncio.sleep(3 * START_S)
        assert harness.active == [0, 1], "what fits serves"
        assert (harness.manager.target, harness.manager.phase) == (3, "pending")
        state = await harness.manager.describe()
        assert state["pending"] == {
            "ranks": [2],
            "reason": "no room for engine 2",
            "bundles": [{"CPU": 0.01}],
        }
        assert state["rescale"]["error"] is None and state["state"] == "changing"
        assert harness.coordinator.kept.scaling.pending == 1, "ingresses show it"
        await asyncio.sleep(10_000.0)
        assert harness.manager.phase == "pending", "it never gives up"
        harness.placement.capacity = 3
        await asyncio.sleep(2.0)
        assert harness.manager.phase == "prepare"
        await harness.settle()
        assert harness.active == [0, 1, 2]
        assert (await harness.manager.describe())["pending"] is None
        assert harness.coordinator.kept.scaling.pending == 0

    run(scenario)


def test_phase_and_pending_engines_are_read_together() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        waiting(harness, 1)
        view = harness.coordinator.view

        async def slow_view() -> ClusterView:
            await asyncio.sleep(2 * START_S)
            return await view()

        await harness.manager.scale(2)
        harness.coordinator.view = slow_view  # type: ignore[method-assign]
        for _ in range(2):  # once before it waits, once while it does
            state = await harness.manager.describe()
            is_pending = state["rescale"]["phase"] == "pending"
            assert is_pending == (state["pending"] is not None), state

    run(scenario)


@pytest.mark.parametrize("engines", [1, 2])
def test_a_smaller_target_ends_the_wait(engines: int) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        waiting(harness, 2)
        await harness.manager.scale(4)
        await asyncio.sleep(2 * START_S)
        await harness.manager.scale(engines)
        await harness.settle()
        assert harness.active == list(range(engines)) and harness.manager.phase == "idle"
        assert (await harness.manager.describe())["pending"] is None

    run(scenario)


def test_a_new_manager_requests_room_again() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        waiting(harness, 1)
        await harness.manager.scale(2)
        await harness.manager.save()
        await asyncio.sleep(START_S)
        await harness.lose_manager()
        await harness.manager.start()
        await asyncio.sleep(START_S)
        assert (harness.manager.target, harness.manager.phase) == (2, "pending")
        harness.placement.capacity = 2
        await asyncio.sleep(2.0)
        await harness.settle()
        assert harness.active == [0, 1]

    run(scenario)


# -------------------------------------------------------------------------------- the load


def loaded(harness: ManagerHarness, waits: int) -> None:
    for rank in range(4):
        harness.coordinator.reports[rank] = EngineReport(rank, running=waits, waiting=waits)


def autoscaled(harness: ManagerHarness) -> None:
    harness.configure(
        autoscaling={"enabled": True}, cluster={"max_engines": 3, "drain_timeout_s": 5}
    )


def test_the_autoscaler_sets_the_target_within_its_limits() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        autoscaled(harness)
        await harness.start()
        loaded(harness, 5)
        await asyncio.sleep(20.0)
        assert harness.manager.target == 2
        state = (await harness.manager.describe())["autoscaling"]
        assert state["last_decision"]["engines"] == 2 and "wait" in state["reason"]
        await asyncio.sleep(100.0)
        assert harness.active == [0, 1, 2], "never more than cluster.max_engines"
        await harness.manager.pause()
        loaded(harness, 0)
        await asyncio.sleep(1000.0)
        assert harness.manager.target == 3, "nothing is decided while it is paused"
        await harness.manager.resume()
        await asyncio.sleep(1000.0)
        assert harness.active == [0] and harness.manager.target == 1
        scaling = harness.coordinator.kept.scaling
        assert (scaling.grows, scaling.shrinks) == (2, 2)

    run(scenario)


def test_a_failed_start_does_not_end_a_growth_of_the_autoscaler() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        autoscaled(harness)
        await harness.start()
        harness.placement.failures = {1: [StartFailed("it crashed", permanent=False)] * 2}
        loaded(harness, 5)
        await asyncio.sleep(25.0 + START_S)
        assert harness.manager.target == 2 and harness.active == [0]
        await asyncio.sleep(10 * START_S)
        assert 1 in harness.active

    run(scenario)


def test_the_autoscaler_continues_from_an_operators_target() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        autoscaled(harness)
        await harness.start()
        await harness.manager.scale(3)
        await harness.settle()
        assert harness.active == [0, 1, 2]
        await asyncio.sleep(200.0)
        assert harness.manager.target == 3
        await asyncio.sleep(800.0)
        assert harness.manager.target == 1, "an idle cluster shrinks again"

    run(scenario)
