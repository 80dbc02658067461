"""The outcomes of an upgrade: done, failed, cancelled, or replaced by another one. Each phase has a
way out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from swell.cluster.control.plan.control_state import ScaleRefused
from swell.cluster.control.plan.upgrade import UpgradeState, begin, take_over
from swell.cluster.control.plan.versions import MAX_VERSIONS, UpgradeRecord
from swell.configs.schema import load
from tests.cluster.control.fake_manager import START_S, ManagerHarness, run
from tests.cluster.control.manager.test_manager_upgrade import until

OLD, NEW, THIRD = "1-configuration", "2-other", "3-third"
CONFIG = load({"model": {"path": "m"}})


async def described(harness: ManagerHarness) -> dict[str, Any]:
    state: dict[str, Any] = (await harness.manager.describe())["upgrade"]
    return state


def counts(harness: ManagerHarness) -> tuple[int, int, int]:
    """Returns how many upgrades are done, failed and cancelled, as the coordinator has them for the
    metrics."""
    status = harness.coordinator.kept.scaling.upgrade
    return status.done, status.failed, status.cancelled


async def phases(harness: ManagerHarness) -> list[str]:
    """Returns the phases until the upgrade has finished."""
    seen: list[str] = []
    for _ in range(10_000):
        phase = (await described(harness))["phase"]
        seen += [phase] if seen[-1:] != [phase] else []
        if phase in ("idle", "failed", "cancelled"):
            await harness.settle()
            return seen
        await asyncio.sleep(0.1)
    raise AssertionError(f"it does not end: {seen}")


def test_a_cancelled_upgrade_does_not_count_as_failed() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        with pytest.raises(ScaleRefused, match="already"):
            await harness.upgrade("configuration")
        await harness.upgrade("other")
        await until(lambda: NEW in harness.versions)
        await harness.upgrade("configuration")
        assert await phases(harness) == ["cancelling", "cancelled"]
        assert harness.versions == [OLD] * 2
        state = await described(harness)
        assert (state["version"], state["previous"], state["error"]) == (OLD, NEW, None)
        assert counts(harness) == (0, 0, 1)
        assert harness.coordinator.kept.scaling.upgrade.phase == "cancelled"

    run(scenario, data=2)


def test_a_failed_upgrade_is_counted_when_it_is_abandoned() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.capacity = 2
        await harness.upgrade("other")
        await until(lambda: NEW in harness.versions)
        harness.placement.broken = {NEW}
        await until(lambda: harness.manager.upgrader.record.phase == "rolling back")
        await asyncio.sleep(0.1)
        assert counts(harness) == (0, 1, 0)
        assert await phases(harness) == ["rolling back", "failed"]
        assert counts(harness) == (0, 1, 0)

    run(scenario, data=2)


def test_the_next_manager_keeps_the_outcome_counts() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.upgrade("other")
        await harness.settle()
        await harness.lose_manager()
        await harness.start()
        assert counts(harness) == (1, 0, 0)

    run(scenario)


def test_another_version_replaces_a_running_upgrade() -> None:
    """A roll-back returns to the last version that all engines had."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.upgrade("other")
        await until(lambda: NEW in harness.versions)
        await harness.upgrade("third")
        assert (await described(harness))["previous"] == OLD
        assert await phases(harness) == ["in progress", "idle"]
        assert harness.versions == [THIRD] * 3
        assert counts(harness) == (1, 0, 1)

    run(scenario, data=3)


def test_a_failed_upgrade_that_replaced_another_reverts_to_the_version_before_both() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.broken = {THIRD}
        await harness.upgrade("other")
        await until(lambda: NEW in harness.versions)
        await harness.upgrade("third")
        assert await phases(harness) == ["in progress", "rolling back", "failed"]
        assert harness.versions == [OLD] * 3

    run(scenario, data=3)


@pytest.mark.parametrize("capacity", [2, 1000])
def test_a_rollback_to_missing_weights_is_retried_with_growing_delays(capacity: int) -> None:
    """The state shows the retries. Another version is a way out."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.placement.capacity = capacity
        await harness.upgrade("other")
        await until(lambda: NEW in harness.versions)
        harness.placement.broken = {OLD, NEW}
        await until(lambda: harness.manager.upgrader.record.phase == "rolling back")
        await asyncio.sleep(10 * START_S)
        state = await described(harness)
        assert state["phase"] == "rolling back" and state["version"] == OLD
        assert f"version {NEW} did not become ready" in state["error"]
        assert f"version {OLD} does not start: its weights do not load" in state["error"]
        assert "serves on" not in state["error"] and state["failures"] > 4
        before = len(harness.placement.ranks_of_event("start"))
        await asyncio.sleep(1000.0)
        assert 2 <= len(harness.placement.ranks_of_event("start")) - before < 15
        assert (await described(harness))["failures"] > state["failures"]
        await harness.upgrade("third")
        assert await phases(harness) == ["in progress", "idle"]
        assert harness.versions == [THIRD] * 2
        assert counts(harness) == (1, 1, 0)

    run(scenario, data=2)


def test_a_rollback_of_the_only_engine_needs_no_extra_room() -> None:
    """A host was lost meanwhile. The cancelled version serves until its answers have finished, then
    the other version takes its place."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.upgrade("other")
        await until(lambda: NEW in harness.versions)
        harness.placement.capacity = 1
        await harness.upgrade("configuration")
        assert await phases(harness) == ["cancelling", "cancelled"]
        assert harness.versions == [OLD]

    run(scenario)


@pytest.mark.parametrize("stage", ["rolling back", "cancelling"])
def test_a_rollback_can_be_followed_by_the_same_upgrade(stage: str) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        await harness.upgrade("other")
        await until(lambda: harness.versions.count(NEW) == 1)
        if stage == "cancelling":
            await harness.upgrade("configuration")
        else:
            harness.placement.broken = {NEW}
        await until(lambda: harness.manager.upgrader.record.phase == stage)
        harness.placement.broken = set()
        await harness.upgrade("other")
        assert await phases(harness) == ["in progress", "idle"]
        assert harness.versions == ["3-other"] * 2

    run(scenario, data=2)


def test_versions_in_use_are_kept_after_any_number_of_requests() -> None:
    """An engine of the first version finishes an answer. The next manager adopts it."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.needed = {OLD}
        for number in range(2 * MAX_VERSIONS):
            await harness.upgrade(f"other{number}")
            await asyncio.sleep(3 * START_S)
        (oldest,) = [h.name for h in harness.placement.alive.values() if h.version_name == OLD]
        await harness.manager.save()
        await harness.lose_manager()
        await harness.manager.start()
        await asyncio.sleep(START_S)
        assert oldest in harness.placement.processes
        harness.coordinator.needed = set()
        await harness.settle()
        assert harness.versions == [f"{2 * MAX_VERSIONS + 1}-other{2 * MAX_VERSIONS - 1}"]

    run(scenario)


def test_versions_in_use_are_kept_after_any_number_of_deployments() -> None:
    """An engine of the first version finishes an answer meanwhile."""

    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        harness.coordinator.needed = {OLD}
        (oldest,) = [handle.name for handle in harness.placement.alive.values()]
        for number in range(2 * MAX_VERSIONS):
            await harness.manager.save()
            harness.config_hash = f"other{number}"
            await harness.lose_manager()
            await harness.manager.start()
            await asyncio.sleep(3 * START_S)
            assert oldest in harness.placement.processes
        harness.coordinator.needed = set()
        await harness.settle()
        assert harness.versions == [f"{2 * MAX_VERSIONS + 1}-other{2 * MAX_VERSIONS - 1}"]

    run(scenario)


def requested(state: UpgradeState, *hashes: str) -> UpgradeState:
    for config_hash in hashes:
        state = begin(state, config_hash, CONFIG, [v.name for v in state.record.versions][-1:])
    return state


def test_the_number_of_versions_in_use_is_limited() -> None:
    """The limit does not block an operator who returns to an earlier version."""
    state = take_over(UpgradeRecord(), "one", CONFIG)
    names = [f"{n}-v" for n in range(MAX_VERSIONS)]
    with pytest.raises(ScaleRefused, match=f"{MAX_VERSIONS} versions have engines .* the limit is"):
        begin(state, "two", CONFIG, names)
    state = requested(state, "two", "three")
    assert begin(state, "one", CONFIG, names).record.phase == "cancelling"


def test_redeploying_the_previous_version_cancels_an_upgrade() -> None:
    state = take_over(UpgradeRecord(), "one", CONFIG)
    state = take_over(state.record, "two", CONFIG)
    assert state.record.phase == "in progress"
    state = take_over(state.record, "one", CONFIG)
    assert (state.record.phase, state.record.wanted) == ("cancelling", "1-one")
