"""Managers that take over from an earlier one, and coordinators that restart."""

from __future__ import annotations

import asyncio

import pytest

from swell.cluster.control.manager import ClusterManager
from swell.cluster.control.plan.checkpoint import ClusterCheckpoint
from swell.cluster.control.plan.control_state import ScaleRefused
from swell.coordinator import roster
from swell.coordinator.manager_state import DesiredState, ManagerState, Sleep
from swell.coordinator.roster import Member, Roster
from swell.coordinator.transport.channel import ChannelAddress
from tests.cluster.control.fake_manager import (
    START_S,
    ManagerHarness,
    busy,
    permanent,
    run,
    transient,
)

# -------------------------------------------------------------------------------- managers


def test_a_new_manager_adopts_serving_engines() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        members = [harness.placement.add_existing(rank) for rank in (0, 2, 3)]
        harness.coordinator.roster = before = roster.join(Roster(), members)
        await harness.start()
        assert (
            harness.coordinator.roster is before and harness.placement.ranks_of_event("start") == []
        )
        assert (harness.manager.target, harness.manager.phase) == (3, "idle")
        harness.placement.kill_engine(2)
        await harness.settle()
        assert harness.active == [0, 1, 3]
        await harness.manager.scale(1)
        await harness.settle()
        assert harness.active == [0]

    run(scenario, data=1)


def test_an_adopted_engine_shows_that_the_cluster_has_served() -> None:
    """The old manager was lost while its first engine joined. A failed start of the other engine
    must not end the application."""

    async def scenario(harness: ManagerHarness) -> None:
        member = harness.placement.add_existing(0)
        harness.coordinator.roster = roster.join(Roster(), [member])
        harness.placement.always = permanent("out of memory")
        await harness.manager.start()
        await asyncio.sleep(20)
        assert harness.active == [0]
        assert not (await harness.manager.not_ready_reason())[1]
        assert harness.checkpoints.page[0].desired.served, "the next manager knows it, too"

    run(scenario, data=2)


def test_a_new_manager_continues_a_drain() -> None:
    """The old manager was lost while rank 1 was leaving. The engine still leaves and does not
    return."""

    async def scenario(harness: ManagerHarness) -> None:
        members = [harness.placement.add_existing(rank) for rank in (0, 1)]
        harness.coordinator.roster = roster.leave(roster.join(Roster(), members), [1])
        await harness.start()
        assert harness.active == harness.coordinator.roster.ranks == [0]
        assert harness.manager.target == 1 and list(harness.placement.alive) == [0]

    run(scenario)


def test_a_new_manager_keeps_the_drain_time_of_a_leaving_engine() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        members = [harness.placement.add_existing(rank) for rank in (0, 1)]
        harness.coordinator.roster = roster.leave(roster.join(Roster(), members), [1])
        harness.coordinator.reports[1] = busy(1)
        await harness.manager.start()
        await asyncio.sleep(20)
        assert 1 in harness.placement.alive
        await harness.settle()
        assert list(harness.placement.alive) == [0]

    run(scenario, drain_timeout_s=30)


@pytest.mark.parametrize("restarted", [False, True])
def test_a_new_manager_continues_with_the_remaining_drain_time(restarted: bool) -> None:
    """The operator chose a longer drain time than the configured one. `restarted`: the coordinator
    restarted too and does not know that the engine is leaving."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[1] = busy(1)
        await harness.manager.scale(1, 200.0)
        await asyncio.sleep(50.0)
        await harness.lose_manager()
        await asyncio.sleep(20.0)
        if restarted:
            harness.coordinator.restart(0, 1)
            harness.coordinator.reports[1] = busy(1)
        await harness.manager.start()
        await asyncio.sleep(1.0)
        assert harness.active == [0]
        await asyncio.sleep(119.0)
        assert 1 in harness.placement.alive, "190 of 200 seconds are over"
        await asyncio.sleep(20.0)
        assert list(harness.placement.alive) == [0]

    run(scenario, data=2, drain_timeout_s=30)


def test_a_new_manager_still_removes_a_named_engine() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[0] = busy(0)
        harness.manager.drain(0)
        await harness.manager.save()
        await harness.lose_manager()
        await harness.manager.start()
        await harness.manager.scale(2)
        await asyncio.sleep(2 * START_S)
        assert harness.active == [1, 2]

    run(scenario, data=2, drain_timeout_s=3600)


def test_an_expired_drain_time_stays_expired_for_a_new_manager() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[1] = busy(1)
        await harness.manager.scale(1, 20.0)
        await asyncio.sleep(1.0)
        await harness.lose_manager()
        await asyncio.sleep(100.0)
        await harness.manager.start()
        await asyncio.sleep(1.0)
        assert list(harness.placement.alive) == [0]

    run(scenario, data=2, drain_timeout_s=30)


def test_stop_ends_engines_that_are_still_starting() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.manager.scale(3)
        await asyncio.sleep(START_S / 2)

    harness = run(scenario)
    assert harness.placement.starting == 0 and harness.placement.events[-1] == ("close", [])


@pytest.mark.parametrize("shrinks", [False, True])
def test_the_next_manager_continues_a_change_of_a_lost_one(shrinks) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        if shrinks:
            harness.coordinator.reports[1] = busy(1)
        await harness.manager.scale(1 if shrinks else 3)
        await asyncio.sleep(START_S / 2)
        await harness.lose_manager()
        harness.coordinator.reports.clear()
        await harness.start()
        assert harness.active == ([0] if shrinks else [0, 1, 2])
        assert (harness.manager.phase, harness.manager.error) == ("idle", None)

    run(scenario, data=2)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_returning_manager_leaves_everything_to_the_leader(stopped) -> None:
    """`stopped`: the old manager stops before it notices that there is another."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        first, harness.manager = harness.manager, harness.another()
        if stopped:
            await first._fleet.tasks.cancel()
        await harness.start()
        harness.placement.events.clear()
        if not stopped:
            with pytest.raises(ScaleRefused, match="taken over"):
                await first.scale(5)
            await harness.settle()
        await first.stop()
        assert harness.active == [0, 1] and harness.placement.events == []

    run(scenario, data=2)


def test_a_new_manager_keeps_the_pause() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.manager.pause()
        await asyncio.sleep(1)
        await harness.lose_manager()
        await harness.start()
        await asyncio.sleep(100)
        assert harness.manager.pause_requested and harness.coordinator.state == "paused"

    run(scenario)


# ----------------------------------------------------------- managers and engines together


@pytest.mark.parametrize("coordinator", [False, True])
@pytest.mark.parametrize("dead", [[0], [1, 2], [0, 1, 2]])
def test_engines_and_manager_die_together(dead, coordinator) -> None:
    """The resources of the dead engines are released, and the requested number of engines serves
    again, although every process that knew this number is dead."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.manager.scale(3)
        await harness.settle()
        harness.placement.capacity = 3
        await harness.lose_manager()
        for rank in dead:
            harness.placement.kill_engine(rank)
        if coordinator:
            harness.coordinator.restart(*sorted({0, 1, 2} - set(dead)))
        await harness.start()
        assert harness.active == [0, 1, 2] and harness.manager.target == 3
        assert (harness.manager.phase, harness.manager.error) == ("idle", None)
        assert len(harness.placement.groups) == 3

    run(scenario)


@pytest.mark.parametrize("after_s", [START_S / 2, START_S + 5])
def test_loading_and_waiting_engines_are_adopted(after_s) -> None:
    """The manager dies while a new engine loads, or while its group forms."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.group_s = 10.0
        await harness.manager.scale(2)
        await asyncio.sleep(after_s)
        await harness.lose_manager()
        before = set(harness.placement.processes)
        await harness.manager.start()
        await asyncio.sleep(START_S + 15)
        assert set(harness.placement.processes) == before and len(before) == 2
        assert harness.active == [0, 1] and harness.manager.phase == "idle"
        assert harness.placement.ranks_of_event("orphan") == []

    run(scenario)


def test_the_serving_one_of_two_engines_with_one_rank_is_kept() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        engine = harness.placement.alive[0].name
        harness.placement.place(harness.placement.plan(0, harness.manager.upgrader.wanted), 1e6)
        await harness.lose_manager()
        await harness.start()
        assert set(harness.placement.processes) == {engine} and harness.active == [0]

    run(scenario)


@pytest.mark.parametrize("keeps_checkpoint", [True, False])
def test_sleep_survives_the_manager_and_a_pause_wakes_no_engine(keeps_checkpoint: bool) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.manager.pause(Sleep(2, refuses=True))
        await harness.manager.save()
        await harness.manager.pause()
        await harness.manager.pause(Sleep(1, refuses=True))  # all sleep at level 2 already
        await harness.settle()
        if not keeps_checkpoint:
            harness.checkpoints.page[0] = ClusterCheckpoint()
        await harness.lose_manager()
        await harness.start()
        await harness.settle()
        kept = harness.coordinator.kept.desired
        assert kept.pause_requested and kept.sleep == Sleep(2, refuses=True)
        await harness.manager.resume()
        await harness.settle()
        kept = harness.coordinator.kept.desired
        assert not kept.pause_requested and kept.sleep == Sleep()

    run(scenario)


def test_a_replaced_target_is_forgotten() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.failures = {1: [transient()]}
        await harness.manager.scale(2)
        await harness.settle()
        await harness.lose_manager()
        await harness.start()
        assert harness.active == [0] and harness.manager.target == 1

    run(scenario)


def test_a_pause_does_not_wait_for_an_unreadable_checkpoint() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.checkpoints.hangs = True
        async with asyncio.timeout(3):
            await harness.manager.pause()
        assert harness.coordinator.state == "paused" and harness.manager.pause_requested
        harness.checkpoints.hangs = False

    run(scenario)


def test_an_unreadable_checkpoint_stops_no_engine() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.checkpoints.away = True
        harness.placement.kill_engine(0)
        await asyncio.sleep(1)
        await harness.manager.scale(2)
        await harness.settle()
        assert harness.active == [0, 1]
        harness.checkpoints.away = False
        await harness.manager.save()
        assert harness.checkpoints.page[0].desired.target == 2

    run(scenario)


# -------------------------------------------------------------------------------- coordinators


def test_an_engine_that_a_restarted_coordinator_does_not_know_joins_again() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        engines = dict(harness.placement.alive)
        harness.coordinator.restart(0, 2)
        await harness.settle()
        assert harness.active == [0, 1, 2] and harness.placement.alive == engines

    run(scenario, data=3)


def test_a_silent_engine_that_a_restarted_coordinator_does_not_know_is_replaced() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        engine = harness.placement.alive[1]
        harness.placement.hung.add(1)
        harness.coordinator.restart(0)
        await harness.settle()
        assert harness.active == [0, 1] and harness.placement.alive[1] is not engine
        assert harness.placement.ranks_of_event("kill") == [[1]]

    run(scenario, data=2)


def test_an_engine_continues_leaving_after_a_restart_of_the_coordinator() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[1] = busy(1)
        await harness.manager.scale(1)
        await asyncio.sleep(1)
        harness.coordinator.restart(0, 1)
        await asyncio.sleep(1)
        assert harness.active == [0] and harness.coordinator.roster.ranks == [0, 1]
        harness.coordinator.reports.clear()
        await harness.settle()
        assert harness.coordinator.roster.ranks == [0]

    run(scenario, data=2)


def test_an_engine_that_was_marked_as_leaving_too_late_is_kept() -> None:
    """Calls to the coordinator may arrive in another order than they were sent."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.coordinator.leave([1])
        await asyncio.sleep(1)
        assert harness.active == [0, 1]

    run(scenario, data=2)


def test_a_restarted_coordinator_receives_the_desired_state() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.manager.pause()
        await asyncio.sleep(1)
        harness.coordinator.restart(0)
        await asyncio.sleep(10)
        assert harness.coordinator.state == "paused"
        assert harness.coordinator.kept.desired.owner != ""

    run(scenario)


def test_a_restarted_coordinator_of_an_earlier_manager_receives_the_desired_state() -> None:
    """The restarted coordinator knows only a predecessor of this manager, which had another
    target."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        newest = harness.coordinator.kept
        harness.coordinator.restart(0)
        harness.coordinator.kept = ManagerState(
            DesiredState("earlier", target=3, term=newest.desired.term - 1)
        )
        await asyncio.sleep(10)
        assert harness.coordinator.kept.manager_id == newest.manager_id
        await harness.manager.scale(2)
        await harness.settle()
        assert harness.active == [0, 1]

    run(scenario)


def test_a_detached_engine_does_not_rejoin() -> None:
    """The drain of the engine and the coordinator's restart both wait for the same group change."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.group_s = 10.0
        await harness.manager.scale(3)
        await asyncio.sleep(START_S + 1)
        harness.manager.drain(1)
        await asyncio.sleep(4)
        assert harness.manager.phase == "commit" and harness.coordinator.roster.ranks == [0, 1]
        harness.placement.events.clear()
        harness.coordinator.restart(0)
        await harness.settle()
        assert harness.active == harness.coordinator.roster.ranks == [0, 2]
        assert [1] not in harness.placement.ranks_of_event("join")

    run(scenario, data=2)


def test_a_manager_that_no_longer_leads_does_not_stop_removed_engines() -> None:
    """The successor did not know that the engine was taken out, and has let it join again."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.group_s = 10.0
        harness.manager.drain(1)
        await asyncio.sleep(4)
        assert harness.manager.phase == "commit"
        harness.placement.may_end = lambda: asyncio.sleep(0.0, False)
        await asyncio.sleep(20)
        assert harness.coordinator.roster.ranks == [0]
        assert 1 in harness.placement.alive
        await harness.placement.end(harness.placement.alive[1])

    run(scenario, data=2)


def test_a_member_without_a_placement_is_removed() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.coordinator._join([Member(7, ChannelAddress("m", "i", "t"))])
        await asyncio.sleep(1)
        assert harness.coordinator.roster.ranks == [0]

    run(scenario)


@pytest.mark.parametrize("stepped_down", [True, False])
@pytest.mark.parametrize("pauses", [True, False])
def test_only_the_manager_that_leads_pauses_and_resumes(stepped_down, pauses) -> None:
    """The other manager may not know yet that it has a successor."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        if not pauses:
            await harness.manager.pause()
            await harness.manager.save()
        first, harness.manager = harness.manager, harness.another()
        if not stepped_down:
            await first._fleet.tasks.cancel()
        await harness.start()
        state = harness.coordinator.state
        with pytest.raises(ScaleRefused, match="taken over"):
            await (first.pause() if pauses else first.resume())
        assert harness.coordinator.state == state == ("serving" if pauses else "paused")

    run(scenario)


def test_a_manager_unaware_of_its_successor_stops_no_starting_engine() -> None:
    """The successor waits for the starting engine."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.slow_s[1] = 5.0
        await harness.manager.scale(2)
        await asyncio.sleep(1)
        await harness.manager.save()
        first, harness.manager = harness.manager, harness.another()
        await first._fleet.tasks.cancel()
        await harness.start()
        harness.placement.may_end = first._checkpoints.confirm_leader
        await first.scale(1)
        with pytest.raises(ScaleRefused, match="taken over"):
            await first.save()
        await asyncio.sleep(10)
        assert sorted(harness.placement.alive) == [0, 1]

    run(scenario)


async def scale(manager: ClusterManager) -> None:
    await manager.scale(1)


async def drain(manager: ClusterManager) -> None:
    manager.drain(1)


@pytest.mark.parametrize("request_change", [scale, drain])
def test_a_manager_that_stepped_down_refuses_changes(request_change) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        first, harness.manager = harness.manager, harness.another()
        await harness.start()
        harness.placement.events.clear()
        with pytest.raises(ScaleRefused, match="taken over"):
            await request_change(first)
        await harness.settle()
        assert harness.active == [0, 1] and harness.placement.events == []

    run(scenario, data=2)


def test_the_stall_of_an_earlier_engine_is_not_that_of_its_successor() -> None:
    """A new manager reads the stalled engines of the coordinator's whole life. An engine that is
    missing from the roster joins again, although an earlier engine of its rank has stalled."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.report_stalled(1)
        await harness.settle()
        await harness.lose_manager()
        await harness.manager.start()
        second = harness.placement.alive[1].name
        harness.placement.events.clear()
        await harness.coordinator.remove_failed([1])  # before the first membership arrives
        await harness.settle()
        assert harness.active == [0, 1] and harness.placement.alive[1].name == second
        assert [name for name, _ in harness.placement.events] == [
            "remove_failed",
            "refresh",
            "join",
        ]

    run(scenario, data=2)
