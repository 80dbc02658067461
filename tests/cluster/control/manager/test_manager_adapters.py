"""Adapter names outlive managers, coordinators and checkpoints."""

from __future__ import annotations

import pytest

from swell.cluster.control.plan.checkpoint import ClusterCheckpoint
from swell.cluster.text.adapters import AdapterRefused, LoadedAdapters
from swell.configs.lora import Adapter, LoraConfig
from tests.cluster.control.fake_manager import ManagerHarness, run

ONE, OTHER = Adapter("one", "/one", "1"), Adapter("one", "/two", "2")


async def started(harness: ManagerHarness) -> None:
    harness.configure(lora={"enabled": True})
    await harness.start()


@pytest.mark.parametrize("lost", ["manager", "coordinator too", "checkpoint too"])
def test_a_new_manager_keeps_the_adapters(lost: str) -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await started(harness)
        harness.manager.adapters.load(ONE, in_place=False)
        await harness.manager.save()
        await harness.settle()
        assert harness.coordinator.kept.desired.adapters == (ONE,)
        await harness.lose_manager()
        if lost == "coordinator too":
            harness.coordinator.restart(0)
        if lost == "checkpoint too":
            harness.checkpoints.page[0] = ClusterCheckpoint()
        await harness.start()
        assert harness.manager.adapters.all == (ONE,)
        assert harness.coordinator.kept.desired.adapters == (ONE,)
        harness.manager.adapters.unload("one")
        await harness.manager.save()
        await harness.settle()
        assert (
            harness.coordinator.kept.desired.adapters
            == ()
            == harness.checkpoints.page[0].desired.adapters
        )

    run(scenario)


def test_a_restarted_coordinator_receives_the_adapters() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await started(harness)
        harness.manager.adapters.load(ONE, in_place=False)
        await harness.settle()
        harness.coordinator.restart(0)
        await harness.settle()
        assert harness.coordinator.kept.desired.adapters == (ONE,)

    run(scenario)


def test_a_loaded_name_is_replaced_only_on_request() -> None:
    changes: list[None] = []
    config = LoraConfig(enabled=True, adapters={"own": "/own"})
    names = LoadedAdapters(config, "model", lambda: changes.append(None))
    names.load(ONE, in_place=False)
    with pytest.raises(AdapterRefused, match="has already been loaded; unload it first"):
        names.load(OTHER, in_place=False)
    names.load(OTHER, in_place=True)
    assert names.all == (OTHER,) and len(changes) == 2
    for name in ("model", "own"):
        with pytest.raises(AdapterRefused, match="cannot be replaced"):
            names.load(Adapter(name, "/x", "x"), in_place=True)
    with pytest.raises(AdapterRefused, match=r"is listed in lora\.adapters"):
        names.unload("own")
    names.unload("one")
    with pytest.raises(AdapterRefused, match="was not loaded"):
        names.unload("one")
    assert len(changes) == 3
    with pytest.raises(AdapterRefused, match=r"lora\.enabled=false"):
        LoadedAdapters(LoraConfig(), "model").load(ONE, in_place=False)
