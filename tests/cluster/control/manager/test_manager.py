"""Operator requests: growing, shrinking, describing, pausing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from swell.cluster.api.admin.manager_calls import engine_starts
from swell.cluster.control.plan.control_state import ScaleRefused
from swell.coordinator.roster import MemberState, update_members
from swell.coordinator.wire import ClusterView, EngineReport, WorkerReport, WorkerStatus
from swell.engine.serving.start_timeline import StartPhase
from tests.cluster.control.fake_manager import START_S, ManagerHarness, busy, run

# -------------------------------------------------------------------------------- growing


def test_engines_start_concurrently_and_join_in_one_epoch() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        assert harness.active == [0, 1, 2] and harness.coordinator.roster.epoch == 1
        assert harness.manager.phase == "idle" and harness.manager.error is None

    harness = run(scenario, data=3)
    assert harness.placement.max_starting == 3
    assert harness.placement.events[0] == ("open", [])


def test_scale_up_keeps_the_serving_engines() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        first = harness.placement.alive[0]
        await harness.manager.scale(3)
        assert harness.manager.phase == "prepare"
        await asyncio.sleep(START_S / 2)
        assert harness.active == [0], "newcomers joined before they were ready"
        await harness.settle()
        assert harness.active == [0, 1, 2] and harness.placement.alive[0] is first
        assert harness.manager.target == 3 and harness.manager.phase == "idle"

    run(scenario)


def test_a_newcomer_uses_the_lowest_free_rank() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.manager.drain(1)
        await harness.settle()
        assert harness.active == [0, 2]
        await harness.manager.scale(4)
        await harness.settle()
        assert harness.active == [0, 1, 2, 3]

    run(scenario, data=3)


# -------------------------------------------------------------------------------- shrinking


def test_scale_down_drains_removes_and_stops_the_highest_ranks() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.events.clear()
        await harness.manager.scale(1)
        assert harness.manager.phase == "drain"
        await harness.settle()
        assert harness.active == [0] and list(harness.placement.alive) == [0]
        names = [name for name, _ in harness.placement.events]
        assert names == ["leave", "detach", "end", "end"]
        assert (
            harness.placement.ranks_of_event("leave")
            == harness.placement.ranks_of_event("detach")
            == [[1, 2]]
        )

    run(scenario, data=3)


def test_a_leaving_engine_finishes_its_requests_first() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[1] = busy(1)
        await harness.manager.scale(1)
        await asyncio.sleep(20)
        assert harness.active == [0] and 1 in harness.coordinator.roster.ranks
        assert 1 in harness.placement.alive and harness.manager.phase == "drain"
        harness.coordinator.reports[1] = EngineReport(1, waiting=1)
        await asyncio.sleep(5)
        assert 1 in harness.placement.alive, "a waiting request is one, too"
        harness.coordinator.reports[1] = EngineReport(1)
        await harness.settle()
        assert 1 not in harness.placement.alive

    run(scenario, data=2, drain_timeout_s=30)


@pytest.mark.parametrize("moves_at_s", [0.05, 0.11, 0.15])
def test_a_leaving_engine_finishes_requests_that_move_to_it(
    moves_at_s: float,
) -> None:
    """Another engine of its version replaces a worker, so its answers continue on this engine.
    Earlier reports do not show them, and the newest report is late."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        coordinator = harness.coordinator
        await harness.manager.scale(1)
        await asyncio.sleep(moves_at_s)
        before = coordinator.roster.epoch
        coordinator.reports[1] = EngineReport(1, roster_epoch=before)
        coordinator.unheard.add(1)
        repairing = update_members(coordinator.roster, [0], state=MemberState.REPAIRING)
        coordinator._change(repairing, "repairing", [0])
        await asyncio.sleep(5)
        assert 1 in harness.placement.alive
        coordinator.reports[1] = busy(1)
        coordinator.unheard.clear()
        await asyncio.sleep(5)
        assert 1 in harness.placement.alive
        coordinator.reports[1] = EngineReport(1)
        await harness.settle()
        assert 1 not in harness.placement.alive

    run(scenario, data=2, drain_timeout_s=30)


def test_reports_from_before_leaving_do_not_count_for_a_drain() -> None:
    """A restarted coordinator considers the engine active until the manager marks it again."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        coordinator = harness.coordinator
        coordinator.reports[1] = busy(1)
        await harness.manager.scale(1)
        await asyncio.sleep(2)
        active = update_members(coordinator.roster, [1], state=MemberState.ACTIVE)
        coordinator.leave = lambda ranks: asyncio.sleep(0.0, coordinator.roster.epoch)
        coordinator.roster = active
        coordinator.reports[1] = EngineReport(1)
        await asyncio.sleep(5)
        assert 1 in harness.placement.alive

    run(scenario, data=2, drain_timeout_s=30)


def test_a_silent_leaving_engine_has_its_whole_drain_time() -> None:
    """An old report without requests does not show what the engine has now."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.unheard.add(1)
        await harness.manager.scale(1)
        await asyncio.sleep(20)
        assert 1 in harness.placement.alive
        harness.coordinator.unheard.clear()
        await asyncio.sleep(5)
        assert 1 not in harness.placement.alive

    run(scenario, data=2, drain_timeout_s=30)


def test_one_idle_poll_is_not_enough() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[1] = busy(1)
        await harness.manager.scale(1)
        await asyncio.sleep(1.25)
        for running in (0, 1) * 4:  # what each poll sees
            harness.coordinator.reports[1] = EngineReport(1, running=running)
            await asyncio.sleep(0.5)
        assert 1 in harness.placement.alive

    run(scenario, data=2, load_report_s=0.25)


@pytest.mark.parametrize(("drain_timeout_s", "seconds"), [(None, 30), (5.0, 5)])
def test_the_drain_time_is_a_limit(drain_timeout_s, seconds) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[1] = busy(1)
        await harness.manager.scale(1, drain_timeout_s)
        await asyncio.sleep(seconds - 1)
        assert 1 in harness.placement.alive
        await asyncio.sleep(2)
        assert 1 not in harness.placement.alive
        await harness.settle()
        assert harness.manager.phase == "idle"

    run(scenario, data=2, drain_timeout_s=30)


def test_drain_removes_the_named_engine() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.manager.drain(0)
        await harness.settle()
        assert harness.active == [1, 2] and harness.manager.target == 2
        with pytest.raises(ScaleRefused, match=r"no engine 0; engines: \[1, 2\]"):
            harness.manager.drain(0)

    run(scenario, data=3)


def test_a_refused_drain_marks_no_engine() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        with pytest.raises(ScaleRefused, match="min_engines=2"):
            harness.manager.drain(0)
        await harness.manager.scale(3)
        await harness.settle()
        await harness.manager.scale(2)
        await harness.settle()
        assert harness.active == [0, 1]

    run(scenario, data=2, min_engines=2)


# -------------------------------------------------------------------------------- refusals


def test_a_target_without_room_is_refused_and_nothing_changes() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        harness.placement.room = 2
        await harness.start()
        harness.placement.events.clear()
        with pytest.raises(ScaleRefused, match="no room for 3 engines"):
            await harness.manager.scale(3)
        assert (harness.manager.target, harness.manager.phase) == (2, "idle")
        await harness.settle()
        assert harness.placement.events == []
        harness.placement.room = 0
        await harness.manager.scale(1)
        await harness.settle()
        assert harness.active == [0], "to shrink needs no room"

    run(scenario, data=2)


@pytest.mark.parametrize("engines", [0, -1, 5])
def test_a_target_out_of_range_is_refused(engines) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        with pytest.raises(ScaleRefused, match=rf"={engines} .*=1 .*max_engines=4"):
            await harness.manager.scale(engines)
        assert (harness.manager.target, harness.manager.phase) == (2, "idle")
        await harness.settle()
        assert harness.active == [0, 1]

    run(scenario, data=2, max_engines=4)


# -------------------------------------------------------------------------------- describing


def test_the_phases_of_an_engine_begin_with_its_process() -> None:
    """The process is missing if another manager started it."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        handle, loading = harness.manager._fleet.engines[0], StartPhase("loading weights", 2.0)
        assert handle.ready is not None
        handle.ready = replace(handle.ready, start=[loading])
        manager = SimpleNamespace(describe=SimpleNamespace(remote=harness.manager.describe))
        assert (await engine_starts(manager))[0] == [loading]
        handle.process_s = 1.5
        found = await engine_starts(manager)
        assert found[0] == [StartPhase("starting the process", 1.5), loading]
        assert [*found] == [0, 1]

    run(scenario, data=2)


def test_describe_has_all_fields_of_the_contract() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.manager.start()
        await asyncio.sleep(START_S / 2)
        described = await harness.manager.describe()
        assert described["state"] == "starting"
        await asyncio.sleep(0)
        described = await harness.manager.describe()
        assert described["engines"][0]["starting"] == "waiting for resources"
        assert [(e["rank"], e["state"]) for e in described["engines"]] == [
            (0, "starting"),
            (1, "starting"),
        ]
        text, failed = await harness.manager.not_ready_reason()
        assert "engine 0: " in text and "engine 1: " in text and not failed
        await harness.settle()
        workers = (WorkerReport(WorkerStatus.READY, 2009, 1),)
        harness.coordinator.reports[1] = EngineReport(
            1,
            incarnation=harness.coordinator.roster.members[1].incarnation,
            epoch=5,
            running=2,
            waiting=3,
            kv_usage=0.5,
            steps=9,
            wave=4,
            repairs=1,
            workers=workers,
            hang_report="host:worker",
        )
        harness.placement.hang_reports.append("host:engine")
        described = await harness.manager.describe()
        assert described["engines"][1] == {
            "rank": 1,
            "state": "active",
            "version": "1-configuration",
            "numerics": "",
            "pid": 1001,
            "node": "node",
            "running": 2,
            "waiting": 3,
            "kv_usage": 0.5,
            "steps": 9,
            "epoch": 5,
            "wave": 4,
            "repairs": 1,
            "sleep_level": 0,
            "freed_bytes": 0,
            "workers": [
                {"rank": 0, "tensor": 0, "pipeline": 0}
                | {"pid": 2009, "status": "ready", "replaced": 1}
            ],
            "starting": "",
            "start": [],
        }
        del described["engines"]
        assert described.pop("upgrade")["version"] == "1-configuration"
        assert described == {
            "epoch": 1,
            "wave": 0,
            "state": "serving",
            "target": 2,
            "coordinator": {"pid": 77, "error": None},
            "rescale": {"phase": "idle", "error": None, "failures": 0, "next_try_s": None},
            "leftovers": None,
            "autoscaling": None,
            "pending": None,
            "draining_nodes": [],
            "hang_reports": ["host:engine", "host:worker"],
            "cache_generation": 0,
        }

    run(scenario, data=2)


def test_a_cluster_described_as_idle_has_the_roster_of_its_last_change() -> None:
    """The change finishes while the description waits for the coordinator."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        read = harness.coordinator.view

        async def answer_late() -> ClusterView:
            harness.coordinator.view = read  # type: ignore[method-assign]
            view = await read()
            await asyncio.sleep(1.5)
            return view

        await harness.manager.scale(2)
        await asyncio.sleep(START_S - 1.0)
        harness.coordinator.view = answer_late  # type: ignore[method-assign]
        described = await harness.manager.describe()
        assert [engine["state"] for engine in described["engines"]] != ["active", "active"]
        assert harness.active == [0, 1] and harness.manager.phase == "idle", "the case under test"
        assert described["rescale"]["phase"] == "prepare"

    run(scenario)


def test_describe_reports_a_running_change() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[1] = busy(1)
        await harness.manager.scale(1)
        await asyncio.sleep(1)
        described = await harness.manager.describe()
        assert described["state"] == "changing"
        assert [e["state"] for e in described["engines"]] == ["active", "leaving"]

    run(scenario, data=2)


@pytest.mark.parametrize("state", ["forming", "pausing"])
def test_engines_whose_group_does_not_step_are_not_reported_as_serving(state: str) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        assert (await harness.manager.describe())["state"] == "serving"
        harness.coordinator.state = state
        assert (await harness.manager.describe())["state"] == "changing"
        harness.coordinator.state = "serving"

    run(scenario, data=2)


@pytest.mark.parametrize("outage", ["silent", "gone"])
def test_describe_returns_the_last_state_while_the_coordinator_is_unavailable(outage) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        before = await harness.manager.describe()
        setattr(harness.coordinator, outage, True)
        meanwhile = await harness.manager.describe()
        assert "does not answer" in meanwhile["coordinator"]["error"]
        assert {**meanwhile, "coordinator": before["coordinator"]} == before
        setattr(harness.coordinator, outage, False)
        assert await harness.manager.describe() == before

    run(scenario, data=2)


# -------------------------------------------------------------------------------- pausing


def test_a_pause_lasts_until_the_resume() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.manager.pause()
        await asyncio.sleep(100)
        assert harness.coordinator.state == "paused"
        assert (await harness.manager.describe())["state"] == "paused"
        await harness.manager.resume()
        await asyncio.sleep(100)
        assert (await harness.manager.describe())["state"] == "serving"

    run(scenario)


def test_only_the_newcomer_that_the_group_excluded_counts_as_failed() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        reason = "no group formed with engine 2 at 10.0.0.7:6 in 60.0 s"
        harness.coordinator.refused = {2: reason}
        await harness.manager.scale(4)
        await harness.settle()
        assert harness.active == [0, 1, 3] and 2 not in harness.placement.alive
        assert (harness.manager.phase, harness.manager.target) == ("failed", 3)
        assert reason in (harness.manager.error or "")

    run(scenario)
