"""Drains that something else delays: a change of the group, or the loss of the manager."""

from __future__ import annotations

import asyncio

import pytest

from swell.cluster.control.engines.engine_handle import EngineHandle
from swell.cluster.control.ray.actor_errors import ActorUnavailable
from swell.coordinator import roster
from swell.coordinator.manager_state import ManagerState
from tests.cluster.control.fake_manager import START_S, ManagerHarness, busy, run

_GROUP_S = 10.0
"""How long the change of the group takes."""


def test_an_engine_that_gets_more_time_while_the_group_changes_keeps_it() -> None:
    """The drain time of the engine ends during a change of the group, and an operator restarts it
    before the change is complete."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.group_s = _GROUP_S
        harness.coordinator.reports[1] = busy(1)
        await harness.manager.scale(3)
        await asyncio.sleep(START_S + 1.0)
        harness.manager.drain(1)
        await asyncio.sleep(6.0)
        assert harness.manager.phase == "commit" and harness.active == [0]
        harness.coordinator.group_s = 0.0
        harness.manager.drain(1)
        await asyncio.sleep(4.0)
        assert harness.active == [0, 2], "the group has changed"
        assert harness.coordinator.roster.ranks == [0, 1, 2]
        await asyncio.sleep(3.0)
        assert harness.coordinator.roster.ranks == [0, 2]

    run(scenario, data=2, drain_timeout_s=5)


def test_a_drained_engine_leaves_although_its_manager_was_lost_while_it_terminated() -> None:
    """The coordinator was lost, too. The next one lists the engine as active, as the engine
    reports."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        placement = harness.placement
        end = placement.end

        async def hang(handle: EngineHandle) -> None:
            await asyncio.sleep(1e6)

        placement.end = hang  # type: ignore[method-assign]
        harness.manager.drain(0)
        await asyncio.sleep(5.0)
        assert harness.coordinator.roster.ranks == [1] and sorted(placement.alive) == [0, 1]
        await harness.lose_manager()
        placement.end = end  # type: ignore[method-assign]
        harness.coordinator.restart(1)
        returned = [placement.alive[0].member]
        harness.coordinator.roster = roster.join(harness.coordinator.roster, returned)
        await harness.start()
        assert harness.active == [1] and list(placement.alive) == [1]

    run(scenario, data=2)


def test_a_drain_outlives_a_manager_that_is_lost_while_it_takes_over() -> None:
    """The coordinator was lost, too, and lists the engine as active. The manager in between has
    stored its state, and has not adopted the engines yet."""

    async def scenario(harness: ManagerHarness) -> None:
        async def unavailable(state: ManagerState) -> None:
            raise ActorUnavailable("the connection broke")

        await harness.start()
        harness.coordinator.reports[0] = busy(0)
        harness.manager.drain(0)
        await harness.manager.save()
        await harness.lose_manager()
        harness.coordinator.restart(0, 1)
        harness.coordinator.reports[0] = busy(0)
        take_over = harness.coordinator.take_over
        harness.coordinator.take_over = unavailable  # type: ignore[method-assign]
        with pytest.raises(ActorUnavailable):
            await harness.manager.start()
        await harness.lose_manager()
        harness.coordinator.take_over = take_over  # type: ignore[method-assign]
        await harness.start()
        assert harness.coordinator.roster.ranks == [1]

    run(scenario, data=2, drain_timeout_s=5)


def test_a_failed_correction_of_the_roster_is_repeated_after_a_pause() -> None:
    """The manager keeps a leaving engine, and the coordinator does not answer twice: the manager
    reads the roster again after a second, although it has not changed."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[1] = busy(1)
        await harness.manager.scale(1)
        await asyncio.sleep(1.0)
        assert harness.active == [0]
        cancel_leave, clock = harness.coordinator.cancel_leave, asyncio.get_running_loop()
        failed_at: list[float] = []

        async def fail_twice(ranks: list[int]) -> None:
            if len(failed_at) < 2:
                failed_at.append(clock.time())
                raise ActorUnavailable("the connection broke")
            await cancel_leave(ranks)

        harness.coordinator.cancel_leave = fail_twice  # type: ignore[method-assign]
        await harness.manager.scale(2)
        while harness.active != [0, 1]:
            await asyncio.sleep(0.1)
        assert clock.time() - failed_at[-1] < 1.5

    run(scenario, data=2, heartbeat_s=1.0)
