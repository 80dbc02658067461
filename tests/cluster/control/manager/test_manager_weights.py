"""In-place updates of the weights of running engines, with a whole manager on a scripted
placement."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from swell.cluster.control.plan.control_state import ScaleRefused
from swell.cluster.control.plan.versions import MAX_VERSIONS, UpgradeStage
from swell.coordinator.manager_state import Sleep
from swell.coordinator.roster import Roster
from tests.cluster.control.fake_manager import FIRST, RELOAD_S, ManagerHarness, busy, run
from tests.cluster.control.manager.test_manager_upgrade import until

NEW = "2-step"


async def updated(harness: ManagerHarness, name: str = "step") -> None:
    await harness.update_weights(name)
    await harness.settle()


def processes(harness: ManagerHarness) -> set[str]:
    return {*harness.placement.processes}


@pytest.mark.parametrize("data", [1, 2, 5])
def test_every_engine_keeps_its_process_and_its_placement_group(data: int) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.capacity = data
        before, epochs = processes(harness), len(harness.placement.ranks_of_event("join"))
        await updated(harness)
        assert harness.versions == [NEW] * data and processes(harness) == before
        assert harness.manager.upgrader.record.stage is UpgradeStage.SETTLED
        assert not harness.placement.ranks_of_event("end")
        reloads = harness.placement.ranks_of_event("reload")
        assert sorted(rank for ranks in reloads for rank in ranks) == list(range(data))
        rounds = len(harness.placement.ranks_of_event("join")) - epochs
        assert rounds == {1: 1, 2: 2, 5: 4}[data], "1, then 2, 1 and 1 of five"

    run(scenario, data=data)


def test_the_first_engine_proves_the_weights() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.broken = {NEW}
        before = processes(harness)
        await updated(harness)
        assert harness.versions == [FIRST] * 4 and processes(harness) == before
        assert len(harness.placement.ranks_of_event("reload")) == 1
        described = (await harness.manager.describe())["upgrade"]
        assert described["phase"] == "failed"
        assert "version 2-step did not become ready" in described["error"]
        assert described["error"].endswith("its weights do not load")
        await updated(harness, "another")
        assert harness.versions == ["3-another"] * 4 and processes(harness) == before

    run(scenario, data=4)


def test_weights_that_a_later_engine_refuses_are_rolled_back_on_all() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        before = processes(harness)
        await harness.update_weights("step")
        await until(lambda: NEW in harness.versions)
        harness.placement.broken = {NEW}
        await harness.settle()
        assert harness.versions == [FIRST] * 3 and processes(harness) == before

    run(scenario, data=3)


def test_the_last_engine_of_a_version_finishes_its_answers_first() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[0] = harness.coordinator.reports[1] = busy(0)
        harness.coordinator.reports[1] = busy(1)
        harness.coordinator.needed = {FIRST}
        await harness.update_weights("step")
        await until(lambda: harness.versions == [NEW])
        await asyncio.sleep(600.0)
        assert harness.versions == [NEW], "the other one leaves, and has answers to end"
        assert FIRST in {m.version for m in harness.coordinator.roster.members}
        harness.coordinator.needed = set()
        harness.coordinator.reports.clear()
        await harness.settle()
        assert harness.versions == [NEW] * 2

    run(scenario, data=2, drain_timeout_s=10)


def test_the_only_engine_keeps_its_answers() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[0], harness.coordinator.needed = busy(0), {FIRST}
        await harness.update_weights("step")
        await asyncio.sleep(600.0)
        assert not harness.placement.ranks_of_event("reload")
        harness.coordinator.needed = set()
        harness.coordinator.reports.clear()
        await harness.settle()
        assert harness.versions == [NEW]

    run(scenario, drain_timeout_s=10)


def test_returning_to_the_previous_weights_cancels_an_update() -> None:
    """The old weights are recognized by their folder, because `model.device` may have been resolved
    since."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        before = processes(harness)
        await updated(harness, "step")
        await harness.update_weights("another")
        await until(lambda: "3-another" in harness.versions)
        await harness.update_weights("step")
        await harness.settle()
        assert harness.versions == [NEW] * 3 and processes(harness) == before
        assert harness.manager.upgrader.record.phase == "cancelled"
        with pytest.raises(ScaleRefused, match="already has this configuration"):
            await harness.update_weights("step")

    run(scenario, data=3)


def test_an_engine_that_leaves_for_obsolete_weights_is_kept() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[0], harness.coordinator.needed = busy(0), {FIRST}
        await harness.update_weights("step")
        await until(lambda: not harness.active)
        await harness.update_weights("m")
        await harness.settle()
        assert harness.versions == [FIRST] and not harness.placement.ranks_of_event("reload")

    run(scenario)


def test_a_new_manager_knows_the_engines_after_hundreds_of_updates() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        before = processes(harness)
        for step in range(3 * MAX_VERSIONS):
            await updated(harness, f"step{step}")
        assert len(harness.manager.upgrader.record.versions) <= MAX_VERSIONS + 1
        await harness.lose_manager()
        await harness.manager.start()
        await updated(harness, "last")
        assert processes(harness) == before and harness.versions == ["14-last"] * 2

    run(scenario, data=2)


@pytest.mark.parametrize("later_s", [0.0, 0.3, RELOAD_S / 2, 1.5 * RELOAD_S, 2.5 * RELOAD_S])
def test_a_new_manager_continues_in_every_phase(later_s: float) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        before = processes(harness)
        await harness.update_weights("step")
        await asyncio.sleep(later_s)
        await harness.lose_manager()
        await asyncio.sleep(1.0)
        await harness.manager.start()
        await harness.settle()
        assert harness.versions == [NEW] * 3 and processes(harness) == before

    run(scenario, data=3)


def test_a_new_manager_continues_a_drain() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        before = processes(harness)
        harness.coordinator.reports[1] = busy(1)
        await harness.update_weights("step")
        await asyncio.sleep(5.0)
        await harness.lose_manager()
        await harness.manager.start()
        harness.coordinator.reports.clear()
        await harness.settle()
        assert harness.versions == [NEW] * 2 and processes(harness) == before

    run(scenario, data=2, drain_timeout_s=600)


def test_a_new_manager_finds_an_engine_that_left_and_has_not_reloaded() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        def has_left() -> bool:
            handles = harness.manager._fleet.starting.values()
            running = [harness.placement.processes[handle.name].version for handle in handles]
            return FIRST in running

        await harness.start()
        before = processes(harness)
        await harness.update_weights("step")
        await until(lambda: NEW in harness.versions)
        while not has_left():
            await asyncio.sleep(0.001)
        await harness.lose_manager()
        await harness.manager.start()
        await harness.settle()
        assert harness.versions == [NEW] * 3 and processes(harness) == before

    run(scenario, data=3)


def test_a_new_manager_matches_drains_with_reloaded_engines() -> None:
    """The GCS was away, so the last checkpoint was written before the update finished."""

    async def scenario(harness: ManagerHarness) -> None:
        async def away(note: object) -> None:
            raise TimeoutError

        await harness.start()
        before = processes(harness)
        harness.coordinator.reports[1] = busy(1)
        await harness.update_weights("step")
        await until(lambda: bool(harness.checkpoints.page[0].drains))
        harness.coordinator.reports.clear()
        write, harness.checkpoints.write = harness.checkpoints.write, away  # type: ignore[method-assign]
        await until(lambda: NEW in harness.versions)
        harness.checkpoints.write = write  # type: ignore[method-assign]
        await harness.lose_manager()
        least = 2
        await harness.manager.start()
        settled = asyncio.create_task(harness.settle())
        while not settled.done():
            least = min(least, len(harness.active))
            await asyncio.sleep(0.05)
        await settled
        assert harness.versions == [NEW] * 2 and processes(harness) == before
        assert least == 1, "one engine serves all the time"

    run(scenario, data=2, drain_timeout_s=600)


def test_a_restarted_coordinator_removes_the_earlier_identity_of_a_reloaded_engine() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        before, coordinator = processes(harness), harness.coordinator
        old = {member.rank: member for member in coordinator.roster.members}
        await harness.update_weights("step")
        await until(lambda: bool(harness.placement.ranks_of_event("reload")))
        members = (*coordinator.roster.members, old[2])
        coordinator._change(Roster(coordinator.roster.epoch + 1, members), "restart", [2])
        await asyncio.sleep(RELOAD_S / 2)
        assert coordinator.roster.find(2) is None, "requests would go to an address without engine"
        await harness.settle()
        assert harness.versions == [NEW] * 3 and processes(harness) == before

    run(scenario, data=3)


def test_engines_restart_if_the_previous_weights_cannot_be_read_again() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        before = processes(harness)
        await harness.update_weights("step")
        await until(lambda: NEW in harness.versions)
        harness.placement.unreadable, harness.placement.broken = {FIRST}, {NEW}
        await harness.settle()
        assert harness.versions == [FIRST] * 3 and len(processes(harness) & before) == 2
        assert harness.manager.upgrader.record.phase == "failed"

    run(scenario, data=3)


def test_versions_that_engines_are_loading_are_not_forgotten() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        before = processes(harness)
        harness.coordinator.group_s = 60.0  # its answer comes late
        await harness.update_weights("s1")
        await until(lambda: any(e.in_transition for e in harness.manager._fleet.engines.values()))
        for number in range(2, 8):
            await harness.update_weights(f"s{number}")
        harness.coordinator.group_s = 0.0
        harness.placement.broken = {"2-s1"}
        await harness.settle()
        assert harness.versions == ["8-s7"] * 2 and processes(harness) == before

    run(scenario, data=2)


def test_frequent_updates_do_not_starve_each_other() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports.update({rank: busy(rank) for rank in range(3)})
        for number in range(5):
            await harness.update_weights(f"s{number}")
            await asyncio.sleep(3.0)
        assert harness.placement.ranks_of_event("reload"), "its time to leave has begun once"
        harness.coordinator.reports.clear()
        await harness.settle()
        assert harness.versions == [harness.manager.upgrader.record.wanted] * 3

    run(scenario, data=3, drain_timeout_s=10)


def test_engines_put_to_sleep_during_an_update_read_nothing() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.update_weights("step")
        await until(lambda: bool(harness.placement.ranks_of_event("reload")))
        await harness.manager.pause(Sleep(2))
        await asyncio.sleep(200.0)
        assert len(harness.placement.ranks_of_event("reload")) == 1
        await harness.manager.resume()
        await harness.settle()
        assert harness.versions == [NEW] * 4

    run(scenario, data=4, drain_timeout_s=5)


def test_an_engine_whose_host_is_drained_during_an_update_is_moved() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        harness.placement.nodes = {1: "spot"}
        await harness.start()
        harness.coordinator.reports[1] = busy(1)
        await harness.update_weights("step")
        await until(lambda: harness.active == [0])
        harness.placement.draining = {"spot": 60.0}
        await asyncio.sleep(30.0)
        assert len(harness.active) == 2, "it serves on, or another one does"
        harness.coordinator.reports.clear()
        harness.placement.draining = {"spot": 0.0}
        await harness.settle()
        assert harness.versions == [NEW] * 2

    run(scenario, data=2, drain_timeout_s=600)


def test_weights_for_another_configuration_than_the_target_are_refused() -> None:
    """An upgrade was requested while the files were read."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        model = harness.config.model
        other = msgspec.structs.replace(model, max_model_len=64)
        weights = msgspec.structs.replace(model, path="/step")
        upgrade, update = (
            msgspec.structs.replace(harness.config, model=each) for each in (other, weights)
        )
        await harness.manager.upgrade("other", upgrade)
        with pytest.raises(ScaleRefused, match="another version was requested in the meantime"):
            await harness.manager.upgrade("step", update, in_place=True)
        await harness.settle()
        assert harness.versions == ["2-other"] * 2

    run(scenario, data=2)


def test_an_engine_that_dies_during_an_update_is_replaced() -> None:
    """The replacement has the version that served before. The update continues."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.update_weights("step")
        await until(lambda: bool(harness.placement.ranks_of_event("reload")))
        name = harness.manager._fleet.starting[2].name
        harness.placement.processes.pop(name).ended.set_result("it was killed")
        await harness.settle()
        assert harness.versions == [NEW] * 3

    run(scenario, data=3)


def test_weights_that_crash_engines_are_abandoned() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        async def end_them() -> None:
            while True:
                for process in list(harness.placement.processes.values()):
                    if process.version == NEW:
                        del harness.placement.processes[process.handle.name]
                        process.ended.set_result("it was killed")
                await asyncio.sleep(0.1)

        await harness.start()
        ends = asyncio.create_task(end_them())
        await updated(harness)
        ends.cancel()
        assert harness.versions == [FIRST] * 3
        assert harness.manager.upgrader.record.phase == "failed"

    run(scenario, data=3)


def test_the_number_of_engines_may_change_during_an_update() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        for engines in (1, 4, 2):
            await harness.update_weights(f"step{engines}")
            await asyncio.sleep(RELOAD_S / 2)
            await harness.manager.scale(engines)
            await harness.settle()
            assert [*{*harness.versions}] == [harness.manager.upgrader.record.wanted]
            assert len(harness.versions) == engines

    run(scenario, data=3)


def test_an_engine_that_reloads_is_not_drained() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.reports[1] = busy(1)
        await harness.update_weights("step")
        await until(lambda: harness.active == [0])
        with pytest.raises(ScaleRefused, match="engine 1 is loading the weights"):
            harness.manager.drain(1)
        harness.coordinator.reports.clear()
        await harness.settle()

    run(scenario, data=2, drain_timeout_s=600)


def test_an_update_replaces_engines_of_an_earlier_upgrade_and_reloads_the_others() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        first = processes(harness)
        await harness.upgrade("other")
        await until(lambda: "2-other" in harness.versions)
        await harness.update_weights("step")
        await harness.settle()
        assert harness.versions == ["3-step"] * 3 and not processes(harness) & first
        assert harness.placement.ranks_of_event("reload")

    run(scenario, data=3)


def test_engines_that_sleep_are_woken_up_first() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.manager.pause(Sleep(2))
        with pytest.raises(ScaleRefused, match="POST /admin/wake"):
            await harness.update_weights("step")
        await harness.manager.resume()
        await updated(harness)
        assert harness.versions == [NEW]

    run(scenario)
