"""Engines that fail to start, die, or are missing from the roster."""

from __future__ import annotations

import asyncio

import pytest

from swell.cluster.control.plan.backoff import EARLY_DEATH_S, MAX_DEATHS, MAX_FAILURES
from swell.cluster.control.ray.actor_errors import ActorDied
from swell.coordinator.roster import Member
from tests.cluster.control.fake_manager import (
    START_S,
    ManagerHarness,
    busy,
    permanent,
    run,
    transient,
)

# -------------------------------------------------------------------------------- failing


def test_a_permanent_failure_of_the_first_start_is_reported_as_final() -> None:
    """`swell serve` exits in this case. Other callers see retries with growing delays."""

    async def scenario(harness: ManagerHarness) -> None:
        harness.placement.always = permanent("model.path='m' is not a folder")
        await harness.start()
        assert harness.manager.phase == "failed" and harness.placement.ranks_of_event("start") == [
            [0]
        ]
        assert await harness.manager.not_ready_reason() == ("model.path='m' is not a folder", True)
        described = await harness.manager.describe()
        assert described["state"] == "failed" and described["engines"] == []
        assert described["rescale"]["phase"] == "failed"
        assert described["rescale"]["error"].startswith("model.path='m' is not a folder (tried 5")
        await asyncio.sleep(1000)
        assert 5 < len(harness.placement.ranks_of_event("start")) < 10
        assert (await harness.manager.not_ready_reason())[1], "in vain during an attempt, too"
        assert (await harness.manager.describe())["state"] == "failed"

    run(scenario)


def test_repeated_failures_are_reported_and_retried_with_growing_delays() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        harness.placement.always = transient("out of memory")
        await harness.start()
        starts = harness.placement.ranks_of_event("start")
        assert len(starts) == MAX_FAILURES
        assert await harness.manager.not_ready_reason() == ("out of memory", True)
        await asyncio.sleep(3600)
        assert MAX_FAILURES + 10 < len(starts := harness.placement.ranks_of_event("start")) < 25
        await harness.settle()
        rescale = (await harness.manager.describe())["rescale"]
        assert (
            rescale["failures"] == len(harness.placement.ranks_of_event("start"))
            and rescale["next_try_s"] > 2
        )
        assert harness.manager.target == 1, "the target stays"
        harness.placement.always = None
        await asyncio.sleep(400)
        assert harness.active == [0]
        assert (harness.manager.phase, harness.manager.error) == ("idle", None)

    run(scenario)


def test_a_new_request_ends_a_wait() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        harness.placement.always = transient("out of memory")
        await harness.start()
        await asyncio.sleep(3600)
        harness.placement.always = None
        await harness.manager.scale(1)
        await asyncio.sleep(2 * START_S)
        assert harness.active == [0] and harness.manager.phase == "idle"

    run(scenario)


def test_a_failure_after_the_first_start_is_not_final() -> None:
    """The reason contains the number of attempts and the time of the next one."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.lose_manager()
        harness.placement.always = permanent("the disk is full")
        harness.placement.kill_engine(0)
        await harness.start()
        text, in_vain = await harness.manager.not_ready_reason()
        assert not in_vain and "the disk is full (tried 5 times; next try in" in text
        assert (await harness.manager.describe())["state"] == "failed"
        harness.placement.always = None
        await asyncio.sleep(60)
        assert harness.active == [0]

    run(scenario)


def test_a_temporary_failure_is_forgotten() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        harness.placement.failures = {0: [transient(), transient()]}
        await harness.manager.start()
        await asyncio.sleep(START_S + 0.01)
        assert not (await harness.manager.not_ready_reason())[1], "not in vain: it is tried again"
        await harness.settle()
        assert harness.active == [0] and harness.placement.ranks_of_event("start") == [[0]] * 3
        assert (harness.manager.phase, harness.manager.error) == ("idle", None)

    run(scenario)


def test_a_failed_grow_leaves_the_old_epoch_serving() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        before = harness.coordinator.roster
        harness.placement.failures = {2: [transient("no room for it")]}
        await harness.manager.scale(3)
        await harness.settle()
        assert harness.coordinator.roster is before and harness.active == [0, 1]
        assert (harness.manager.phase, harness.manager.target) == ("failed", 2)
        described = await harness.manager.describe()
        assert described["state"] == "serving"
        assert described["rescale"]["phase"] == "failed"
        assert described["rescale"]["error"] == (
            "the cluster could not grow to 3 engines, and the target is 2 again: no room for it"
        )
        await asyncio.sleep(1000)
        assert len(harness.placement.ranks_of_event("start")) == 3, "the requested change is over"
        await harness.manager.scale(3)
        assert harness.manager.error is None
        await harness.settle()
        assert harness.active == [0, 1, 2] and harness.manager.phase == "idle"

    run(scenario, data=2)


def test_a_hanging_newcomer_delays_no_other() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.slow_s = {2: 300.0}
        await harness.manager.scale(4)
        await asyncio.sleep(3 * START_S)
        assert harness.active == [0, 1, 3] and harness.manager.phase == "prepare"
        await asyncio.sleep(500.0)
        assert harness.active == [0, 1, 2, 3] and harness.manager.phase == "idle"

    run(scenario)


def test_the_good_half_of_a_half_failed_growth_serves() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.failures = {1: [transient("bad luck")]}
        await harness.manager.scale(3)
        await harness.settle()
        assert harness.active == [0, 2] and harness.manager.target == 2
        assert harness.manager.phase == "failed"
        assert (
            harness.manager.error
            == "the cluster could not grow to 3 engines, and the target is 2 again: bad luck"
        )

    run(scenario)


def test_a_failed_growth_after_a_death_reverts_to_the_last_complete_size() -> None:
    """A replacement is not a change of the target: two engines served before, so the target stays
    two."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.manager.scale(2)
        await harness.settle()
        harness.placement.always = transient()
        harness.placement.kill_engine(0)
        await asyncio.sleep(START_S + 0.2)  # the failed replacement waits for its retry
        assert harness.manager.phase == "prepare"
        await harness.manager.scale(3)
        await harness.settle()
        assert (harness.manager.phase, harness.manager.target) == ("failed", 2)

    run(scenario)


def test_requesting_the_current_size_clears_a_failed_change() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.failures = {1: [transient()]}
        await harness.manager.scale(2)
        await harness.settle()
        assert harness.manager.phase == "failed"
        await harness.manager.scale(1)
        await harness.settle()
        assert (harness.manager.phase, harness.manager.error) == ("idle", None)
        assert harness.active == [0]

    run(scenario)


# -------------------------------------------------------------------------------- dying


def test_a_dead_engine_is_removed_at_once_and_replaced() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        epoch, others = (
            harness.coordinator.roster.epoch,
            [harness.placement.alive[r] for r in (0, 2)],
        )
        harness.placement.events.clear()
        harness.placement.kill_engine(1)
        await asyncio.sleep(0.01)
        assert harness.active == [0, 2] and harness.coordinator.roster.epoch == epoch + 1
        await harness.settle()
        assert harness.active == [0, 1, 2] and harness.manager.phase == "idle"
        assert [harness.placement.alive[r] for r in (0, 2)] == others
        names = [name for name, _ in harness.placement.events]
        assert names == ["remove_failed", "end", "start", "join"]

    run(scenario, data=3)


def test_all_engines_may_die_together_and_again() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        for _ in range(2 * MAX_FAILURES):
            for rank in (0, 1):
                harness.placement.kill_engine(rank)
            await harness.settle()
            assert harness.active == [0, 1]
            await asyncio.sleep(EARLY_DEATH_S)

    run(scenario, data=2)


def test_an_engine_that_dies_while_others_start_is_replaced() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.manager.scale(3)
        await asyncio.sleep(START_S / 2)
        harness.placement.kill_engine(0)
        await harness.settle()
        assert harness.active == [0, 1, 2] and harness.manager.phase == "idle"

    run(scenario, data=2)


@pytest.mark.parametrize("dying", [0, 2])
def test_an_engine_that_dies_while_others_leave_is_replaced(dying) -> None:
    """Rank 2 is leaving. Any engine may die meanwhile, and two serve in the end."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[2] = busy(2)
        await harness.manager.scale(2)
        await asyncio.sleep(1)
        harness.placement.kill_engine(dying)
        harness.coordinator.reports.clear()
        await harness.settle()
        assert harness.active == [0, 1] and harness.manager.phase == "idle"
        assert harness.coordinator.roster.ranks == [0, 1]

    run(scenario, data=3)


def test_engines_that_die_after_every_start_are_replaced_with_growing_delays() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        for death in range(MAX_DEATHS + 1):
            assert (harness.manager.phase, harness.manager.target) == ("idle", 2), death
            harness.placement.kill_engine(1)
            await asyncio.sleep(0.1)
            await harness.settle()
        for part in ("engine 1 has died 6 times in a row", "it was killed", "restarted in"):
            assert part in (harness.manager.error or "")
        described = await harness.manager.describe()
        assert (described["state"], described["target"]) == ("degraded", 2)
        assert described["rescale"]["failures"] == 6
        await asyncio.sleep(2 * EARLY_DEATH_S)
        assert harness.active == [0, 1], "it was tried again"
        assert (harness.manager.phase, harness.manager.error) == ("idle", None)
        assert (await harness.manager.describe())["state"] == "serving"
        harness.placement.kill_engine(1)
        await asyncio.sleep(2 * START_S)
        assert harness.active == [0, 1], "one that lived is replaced at once"

    run(scenario, data=2)


def test_a_slow_start_delays_no_replacement() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.manager.scale(3)
        await asyncio.sleep(START_S / 2)
        harness.placement.kill_engine(0)
        await asyncio.sleep(START_S / 4)
        assert [0] in harness.placement.ranks_of_event("start")[-1:]
        await harness.settle()
        assert harness.active == [0, 1, 2]

    run(scenario, data=2)


def test_a_start_that_fails_is_reported_while_another_one_loads() -> None:
    """Both starts were requested together. The target becomes the number that serves, and the state
    shows the reason at once."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.failures = {1: [transient("its weights do not load")]}
        harness.placement.slow_s = {2: 300.0}
        await harness.manager.scale(3)
        await asyncio.sleep(START_S + 1.0)
        state = await harness.manager.describe()
        assert "its weights do not load" in (state["rescale"]["error"] or "")
        assert "could not grow to 3 engines, and the target is 2 again" in state["rescale"]["error"]
        assert (state["target"], state["rescale"]["phase"]) == (2, "prepare")
        await harness.settle()
        assert harness.active == [0, 2] and harness.manager.phase == "failed"

    run(scenario)


def test_a_replacement_that_fails_is_tried_again_while_another_one_loads() -> None:
    """Both engines die with their host, and one does not find its weights at first."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.lose_manager()
        for rank in (0, 1):
            harness.placement.kill_engine(rank)
        harness.placement.failures = {0: [transient("no such file")] * 2}
        harness.placement.slow_s = {1: 500.0}
        await harness.manager.start()
        await asyncio.sleep(START_S + 1.0)
        assert harness.placement.ranks_of_event("start")[-1] == [0], "the next attempt"
        await asyncio.sleep(START_S)
        rescale = (await harness.manager.describe())["rescale"]
        assert (rescale["failures"], rescale["error"]) == (2, "no such file")
        await asyncio.sleep(2 * START_S)
        assert harness.active == [0]

    run(scenario, data=2)


def test_a_drain_delays_no_replacement() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[2] = busy(2)
        await harness.manager.scale(2)
        await asyncio.sleep(1)
        harness.placement.kill_engine(0)
        await asyncio.sleep(START_S + 1)
        assert harness.active == [0, 1] and 2 in harness.placement.alive

    run(scenario, data=3, drain_timeout_s=60)


def test_a_stalled_engine_is_killed_and_replaced() -> None:
    """A suspended engine cannot stop itself, so the manager kills it without asking."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.events.clear()
        harness.coordinator.report_stalled(1)
        await asyncio.sleep(0.01)
        assert 1 not in harness.placement.alive
        await harness.settle()
        assert harness.active == [0, 1] and harness.manager.phase == "idle"
        names = [name for name, _ in harness.placement.events if name != "remove_failed"]
        assert names == ["stopped", "kill", "start", "join"]

    run(scenario, data=2)


@pytest.mark.parametrize("group_fails", ["rank 2 did not connect", None])
def test_a_group_that_does_not_form_leaves_the_old_epoch_serving(group_fails) -> None:
    """If `group_fails` is None, the new engine dies while the group forms."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        before = harness.coordinator.roster
        harness.coordinator.group_s, harness.coordinator.group_fails = 20, group_fails
        await harness.manager.scale(3)
        await asyncio.sleep(START_S + 10)
        assert harness.manager.phase == "commit" and harness.active == [0, 1]
        if group_fails is None:
            harness.placement.kill_engine(2)
        await harness.settle()
        assert harness.coordinator.roster is before and sorted(harness.placement.alive) == [0, 1]
        assert (harness.manager.phase, harness.manager.target) == ("failed", 2)
        assert (group_fails or "it died meanwhile") in harness.manager.error
        harness.coordinator.group_fails = None
        await harness.manager.scale(3)
        await harness.settle()
        assert harness.active == [0, 1, 2] and harness.manager.phase == "idle"

    run(scenario, data=2)


def test_a_newcomer_that_dies_before_it_may_join_does_not_join() -> None:
    """Another slow change of the group is in progress. The new group would wait for the dead
    engine."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        joined: list[list[int]] = []
        join = harness.coordinator._join

        async def record(members: list[Member]) -> dict[int, str]:
            joined.append([member.rank for member in members])
            return await join(members)

        vars(harness.coordinator)["_join"] = record
        harness.coordinator.group_s = 4 * START_S
        harness.manager.drain(1)
        await asyncio.sleep(START_S)
        await harness.manager.scale(2)
        await asyncio.sleep(2 * START_S)
        assert harness.manager.phase == "commit" and joined == []
        [newcomer] = [rank for rank in harness.placement.alive if rank > 1]
        harness.placement.kill_engine(newcomer)
        harness.coordinator.group_s = 0.0
        await harness.settle()
        assert joined == [], "nobody else wanted to"
        assert harness.active == [0] and harness.manager.target == 1
        assert "it terminated before it joined" in harness.manager.error

    run(scenario, data=2)


def test_a_newcomer_that_dies_as_it_joins_is_replaced() -> None:
    """The roster lists the engine for a moment. Only the manager sees that it is dead."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.dies_on_start.add(1)
        await harness.manager.scale(2)
        await harness.settle()
        assert harness.active == [0, 1] and harness.placement.ranks_of_event("start") == [
            [0],
            [1],
            [1],
        ]

    run(scenario)


def test_a_replacement_that_fails_is_tried_until_it_succeeds() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.events.clear()
        harness.placement.always = transient("no room")
        harness.placement.kill_engine(0)
        await harness.settle()
        assert harness.manager.phase == "failed" and "no room (tried 5" in harness.manager.error
        assert len(harness.placement.ranks_of_event("start")) == MAX_FAILURES
        await asyncio.sleep(10_000)
        harness.placement.always = None
        await asyncio.sleep(400)
        assert harness.active == [0] and harness.manager.phase == "idle"

    run(scenario)


def test_an_engine_that_dies_after_a_failed_grow_is_replaced() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.failures = {2: [transient()]}
        await harness.manager.scale(3)
        await harness.settle()
        harness.placement.kill_engine(0)
        await harness.settle()
        assert harness.active == [0, 1]

    run(scenario, data=2)


def test_an_engine_survives_the_loss_of_the_coordinator_while_it_rejoins() -> None:
    """The death of the coordinator is not blamed on the engine."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        before = list(harness.placement.processes.values())
        harness.coordinator.join_raises = ActorDied("the coordinator's node is gone")
        harness.coordinator.restart()
        await asyncio.sleep(10.0)
        assert harness.coordinator.roster.ranks == []
        harness.coordinator.join_raises = None
        await asyncio.sleep(10.0)
        assert list(harness.coordinator.roster.ranks) == [0]
        assert list(harness.placement.processes.values()) == before

    run(scenario)
