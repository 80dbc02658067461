"""A new target replaces the old one at any stage of a change."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.control.plan.control_state import ScaleRefused
from swell.coordinator import roster
from swell.coordinator.roster import Member, MemberState
from swell.coordinator.transport.channel import ChannelAddress
from swell.coordinator.wire import EngineReport
from tests.cluster.control.fake_manager import (
    CHECKPOINT_S,
    START_S,
    ManagerHarness,
    busy,
    run,
    transient,
)

# -------------------------------------------------------------------------------- prepare


@pytest.mark.parametrize("engines", [1, 2, 3])
def test_obsolete_starts_are_cancelled_at_once(engines) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.manager.scale(4)
        await asyncio.sleep(START_S / 2)
        await harness.manager.scale(engines)
        await asyncio.sleep(0.1)
        assert len(harness.placement.groups) == engines
        assert harness.manager.target == engines
        assert harness.manager.phase == ("idle" if engines == 1 else "prepare")
        await asyncio.sleep(START_S)
        assert harness.active == list(range(engines)) and harness.manager.phase == "idle"
        assert harness.placement.ranks_of_event("start") == [[0], [1], [2], [3]]

    run(scenario)


def test_an_obsolete_start_in_the_queue_does_not_begin() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.manager.scale(3)
        await asyncio.sleep(CHECKPOINT_S / 2)
        await harness.manager.scale(1)
        await asyncio.sleep(2 * START_S)
        assert harness.active == [0] and harness.placement.ranks_of_event("start") == [[0]]

    run(scenario)


@pytest.mark.parametrize("second", [3, 4, 5])
def test_a_failed_change_that_replaced_another_reverts_to_the_last_complete_state(second) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.always = transient("no room")
        await harness.manager.scale(4)
        await asyncio.sleep(START_S / 2)
        await harness.manager.scale(second)
        await harness.settle()
        assert (harness.manager.phase, harness.manager.target) == ("failed", 2)
        assert harness.active == [0, 1] and "no room" in (harness.manager.error or "")

    run(scenario, data=2)


def test_a_larger_target_during_a_start_begins_at_once() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.manager.scale(2)
        await asyncio.sleep(START_S / 2)
        await harness.manager.scale(4)
        await asyncio.sleep(0.1)
        assert len(harness.placement.groups) == 4
        await harness.settle()
        assert harness.active == [0, 1, 2, 3]

    run(scenario)


@pytest.mark.parametrize("engines", [1, 2])
def test_a_ready_engine_that_waits_for_others_can_be_cancelled(engines) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.slow_s = {2: 500.0}
        await harness.manager.scale(3)
        await asyncio.sleep(1.5 * START_S)
        assert sorted(harness.placement.alive) == [0, 1] and harness.active == [0]
        await harness.manager.scale(engines)
        await asyncio.sleep(0.1)
        assert harness.active == list(range(engines)) and len(harness.placement.groups) == engines
        assert harness.manager.phase == "idle"

    run(scenario)


def test_a_failure_of_a_cancelled_start_is_ignored() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.manager.scale(3)
        await asyncio.sleep(START_S / 2)
        harness.placement.always = AssertionError("it was not wanted")  # type: ignore[assignment]
        await harness.manager.scale(1)
        await harness.settle()
        assert (harness.manager.phase, harness.manager.error) == ("idle", None)

    run(scenario)


def test_a_cancelled_start_does_not_block_the_next_one() -> None:
    """A coordinator that restarted meanwhile lists the cancelled engine as a member."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.manager.scale(2)
        await asyncio.sleep(START_S / 2)
        coordinator = harness.coordinator
        heard = Member(1, ChannelAddress("m", "i", "t"), incarnation=99)
        coordinator.roster = roster.join(coordinator.roster, [heard])
        await harness.manager.scale(1)
        await asyncio.sleep(0.05)
        await harness.manager.scale(2)
        await harness.settle()
        assert harness.active == [0, 1]
        assert (harness.manager.phase, harness.manager.error) == ("idle", None)

    run(scenario)


# -------------------------------------------------------------------------------- commit


def test_a_request_during_a_commit_is_executed_after_it() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.group_s = 20
        await harness.manager.scale(3)
        await asyncio.sleep(START_S + 5)
        assert harness.manager.phase == "commit"
        await harness.manager.scale(1)
        assert (harness.manager.target, harness.manager.phase) == (1, "commit")
        await asyncio.sleep(5)
        assert harness.active == [0] and harness.manager.phase == "commit"
        await harness.settle()
        assert harness.active == [0] and harness.coordinator.roster.ranks == [0]

    run(scenario)


# -------------------------------------------------------------------------------- drain


def test_a_draining_engine_is_kept_when_the_target_rises() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        engine = harness.placement.alive[1]
        harness.coordinator.reports[1] = busy(1)
        await harness.manager.scale(1, 3600.0)
        await asyncio.sleep(60)
        assert harness.active == [0] and harness.manager.phase == "drain"
        await harness.manager.scale(2)
        await asyncio.sleep(0.1)
        assert harness.active == [0, 1] and harness.placement.alive[1] is engine
        assert harness.manager.phase == "idle"
        await asyncio.sleep(10_000)
        assert harness.placement.alive[1] is engine, "its old time is over, and it stays"
        assert (
            harness.placement.ranks_of_event("start") == [[0], [1]]
            or len(harness.placement.groups) == 2
        )

    run(scenario, data=2)


def test_an_engine_drained_by_name_is_not_kept() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[0] = busy(0)
        harness.manager.drain(0)
        await asyncio.sleep(1)
        await harness.manager.scale(2)
        await asyncio.sleep(2 * START_S)
        assert harness.active == [1, 2]
        harness.coordinator.reports.clear()
        await harness.settle()
        assert harness.active == [1, 2] and 0 not in harness.placement.alive

    run(scenario, data=2, drain_timeout_s=3600)


def test_a_shorter_drain_timeout_shortens_a_drain() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[1] = busy(1)
        await harness.manager.scale(1, 3600.0)
        await asyncio.sleep(60)
        assert 1 in harness.placement.alive
        await harness.manager.scale(1, 0.0)
        await harness.settle()
        assert list(harness.placement.alive) == [0]

    run(scenario, data=2)


def test_a_longer_drain_timeout_counts_from_now_on() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[1] = busy(1)
        await harness.manager.scale(1, 30.0)
        await asyncio.sleep(20.0)
        await harness.manager.scale(1, 60.0)
        await asyncio.sleep(50.0)
        assert 1 in harness.placement.alive
        await asyncio.sleep(15.0)
        assert list(harness.placement.alive) == [0]

    run(scenario, data=2)


@pytest.mark.parametrize("before", ["scale", "drain"])
def test_a_repeated_drain_restarts_its_timeout(before: str) -> None:
    """The target does not decrease again, and the engine is no longer kept."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[2] = busy(2)
        await (harness.manager.scale(2) if before == "scale" else drain(harness))
        await asyncio.sleep(20.0)
        await drain(harness)
        assert harness.manager.target == 2
        await asyncio.sleep(20.0)
        assert 2 in harness.placement.alive, "it has its time again"
        await harness.manager.scale(3)
        await asyncio.sleep(2 * START_S)
        assert 2 not in harness.placement.alive and len(harness.active) == 3

    async def drain(harness: ManagerHarness) -> None:
        harness.manager.drain(2)
        await asyncio.sleep(0.0)

    run(scenario, data=3, drain_timeout_s=30)


def test_an_engine_that_was_kept_and_leaves_again_is_marked_again() -> None:
    """Reports from before do not show what the engine received since. Another engine is leaving all
    the time."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        coordinator = harness.coordinator
        coordinator.reports |= {1: busy(1), 2: busy(2)}
        await harness.manager.scale(1, 3600.0)
        await asyncio.sleep(1.0)
        heard = coordinator.roster.epoch
        coordinator.unheard = {1}
        coordinator.reports[1] = EngineReport(1, roster_epoch=heard)
        await harness.manager.scale(2)
        await harness.manager.scale(1, 3600.0)
        await asyncio.sleep(60.0)
        assert 1 in harness.placement.alive and coordinator.roster.epoch > heard
        coordinator.unheard.clear()
        await asyncio.sleep(1.0)
        assert sorted(harness.placement.alive) == [0, 2]

    run(scenario, data=3)


def test_the_time_of_a_drain_begins_when_the_coordinator_knows_it() -> None:
    """The coordinator's call is delayed, and the operator repeats the request meanwhile."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        coordinator, leave = harness.coordinator, harness.coordinator.leave
        coordinator.reports[1] = busy(1)

        async def leave_late(ranks: list[int]) -> int:
            coordinator.leave = leave  # type: ignore[method-assign]
            await asyncio.sleep(50.0)
            return await leave(ranks)

        coordinator.leave = leave_late  # type: ignore[method-assign]
        await harness.manager.scale(1)
        await asyncio.sleep(5.0)
        await harness.manager.scale(1)
        await asyncio.sleep(70.0)
        assert 1 in harness.placement.alive, "20 of 30 seconds are over"
        await asyncio.sleep(15.0)
        assert list(harness.placement.alive) == [0]

    run(scenario, data=2, drain_timeout_s=30)


def test_a_lost_host_removes_its_engine_without_a_drain() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        harness.placement.nodes = {1: "spot"}
        await harness.start()
        harness.placement.draining = {"spot": 1000.0}
        await asyncio.sleep(START_S / 2)
        with pytest.raises(ScaleRefused, match="engine 1 is already leaving: its host"):
            harness.manager.drain(1)

    run(scenario, data=2)


def test_a_long_drain_delays_no_other_change() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports.update({1: busy(1), 2: busy(2)})
        await harness.manager.scale(2, 3600.0)
        await asyncio.sleep(1)
        del harness.coordinator.reports[1]
        harness.manager.drain(1)
        await asyncio.sleep(100)
        assert sorted(harness.placement.alive) == [0, 2] and harness.active == [0]

    run(scenario, data=3)


# -------------------------------------------------------------------------------- pause


def test_a_paused_engine_leaves_at_its_drain_timeout() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[1] = busy(1)
        await harness.manager.pause()
        await harness.manager.scale(1, 30.0)
        await asyncio.sleep(20)
        assert 1 in harness.placement.alive
        await harness.settle()
        assert list(harness.placement.alive) == [0] and harness.coordinator.state == "paused"

    run(scenario, data=2)


def test_a_long_drain_while_paused_can_be_cancelled() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[1] = busy(1)
        await harness.manager.scale(1, 3600.0)
        await harness.manager.pause()
        await asyncio.sleep(60)
        await harness.manager.scale(3)
        await harness.settle()
        assert harness.active == [0, 1, 2] and harness.coordinator.state == "paused"
        await harness.manager.resume()
        await harness.settle()
        assert harness.coordinator.state == "serving"

    run(scenario, data=2)


@pytest.mark.parametrize("seconds", [0.0, START_S / 2, START_S + 5])
def test_a_pause_may_begin_during_a_change(seconds) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.group_s = 10
        await harness.manager.scale(2)
        await asyncio.sleep(seconds)
        await harness.manager.pause()
        await harness.settle()
        assert harness.active == [0, 1] and harness.coordinator.state == "paused"
        await harness.manager.resume()

    run(scenario)


def test_a_failure_of_an_obsolete_start_is_ignored() -> None:
    """The failed start is cancelled while the engine that was started with it joins."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.group_s = 10.0
        harness.placement.failures = {2: [transient()]}
        await harness.manager.scale(3)
        await asyncio.sleep(START_S + 5)
        await harness.manager.scale(2)
        await harness.settle()
        assert harness.active == [0, 1] and harness.manager.error is None
        assert not harness.manager._state.backoff.slots

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


async def step(harness: ManagerHarness, what: str, number: int) -> int | None:
    """Carries out one step. Returns the accepted target if one was requested."""
    manager, placement, coordinator = harness.manager, harness.placement, harness.coordinator
    match what:
        case "scale" | "scale now":
            await manager.scale(number, 0.0 if what == "scale now" else None)
            return number
        case "drain":
            stays = number in harness.active
            wanted = manager.target - stays
            try:
                manager.drain(number)
            except ScaleRefused:
                return None
            return wanted
        case "die" if number in placement.alive:
            placement.kill_engine(number)
        case "stop" if coordinator.roster.find(number) is not None:
            coordinator.report_stalled(number)
        case "busy":
            coordinator.reports[number] = busy(number)
        case "pause":
            await manager.pause()
        case "resume":
            await manager.resume()
        case "lose manager" | "lose both":
            await manager.save()
            await harness.lose_manager()
            if what == "lose both":
                coordinator.restart(*placement.alive)
            await harness.manager.start()
    return None


@settings(max_examples=120, derandomize=True, deadline=None, database=None)
@given(st.lists(st.tuples(_STEP, _PAUSES_S), max_size=12), st.sampled_from([0.0, 3.0]))
def test_any_order_of_changes_and_deaths_ends_in_the_last_requested_state(steps, group_s) -> None:
    """In the end there is no extra process, placement group or rank."""

    async def scenario(harness: ManagerHarness) -> None:
        harness.coordinator.group_s = group_s
        await harness.manager.start()
        wanted = 2
        for (what, number), pause_s in steps:
            wanted = await step(harness, what, number) or wanted
            await asyncio.sleep(pause_s)
        assert harness.manager.target == wanted
        harness.coordinator.reports.clear()
        await asyncio.sleep(400)
        await harness.settle()
        assert len(harness.active) == len(harness.coordinator.roster.members) == wanted
        assert len(harness.placement.groups) == len(harness.placement.processes) == wanted
        assert all(m.state is MemberState.ACTIVE for m in harness.coordinator.roster.members)
        assert (harness.manager.phase, harness.manager.error) == ("idle", None)

    run(scenario, data=2)
