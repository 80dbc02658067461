"""Ray's GCS is away while engines are started and stopped. What fails is retried with growing
delays and shown in the state, and in the end nothing stays reserved or alive."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from swell.cluster.control.engines.engine_handle import StartFailed
from swell.cluster.control.engines.orphans import OrphanCollector
from swell.cluster.control.ray.actor_errors import GcsUnavailable
from swell.cluster.control.ray.checkpoint_writer import CheckpointWriter
from swell.configs.schema import load
from swell.coordinator.transport.runtime import ThreadRuntime
from tests.cluster.control.engines.test_placement import (
    VERSION,
    FakeCoordinator,
    ignore,
    made,
    ready_answer,
)
from tests.cluster.control.fake_manager import (
    START_S,
    FakeCheckpointStore,
    ManagerHarness,
    VirtualTimeLoop,
    run,
)
from tests.cluster.control.ray.fake_ray import FakeRay

GCS_S = 10.0


class AwayRay(FakeRay):
    """While `away`, every call fails after some seconds, and `late` is carried out then."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.calls = 0

    async def _answered(self) -> None:
        if self.away:
            self.calls += 1
            await asyncio.sleep(GCS_S)
            raise GcsUnavailable("the GCS does not answer")

    async def create_group(self, name: str, bundle: Mapping[str, float], count: int) -> str:
        group = await super().create_group(name, bundle, count)
        await self._answered()
        return group

    async def create_engine(self, name: str, namespace: str, group: str, **engine: Any) -> str:
        actor = await super().create_engine(name, namespace, group, **engine)
        await self._answered()
        return actor

    async def kill(self, actor: str, *, restart: bool = False) -> None:
        await self._answered()
        await super().kill(actor, restart=restart)

    async def remove_group(self, group: str) -> None:
        await self._answered()
        await super().remove_group(group)

    async def actor_names(self, namespace: str) -> list[str]:
        await self._answered()
        return await super().actor_names(namespace)

    async def groups(self) -> dict[str, str]:
        await self._answered()
        return await super().groups()


def in_virtual_time(scenario: Any) -> None:
    loop = VirtualTimeLoop()
    try:
        loop.run_until_complete(scenario())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def test_killing_an_engine_is_retried_with_growing_delays() -> None:
    async def scenario() -> None:
        ray = AwayRay()
        ours = made(FakeCoordinator(), ray)
        collecting = asyncio.create_task(ours.orphans.collect_forever())
        handle = ours.plan(3, VERSION)
        ray.created = ready_answer(3, 1)
        await ours.start(handle, ignore)
        ray.away = True
        await ours.kill(handle)
        assert not ray.ended
        await asyncio.sleep(3600)
        assert 12 < ray.calls < 30, "ever more slowly"
        left = ours.orphans.leftovers()
        assert left is not None and left.failures > 10 and left.next_try_s <= 300
        assert "the GCS does not answer" in left.reason
        ray.away = False
        await asyncio.sleep(300)
        assert not ray.actors and not ray.reserved and ours.orphans.leftovers() is None
        collecting.cancel()

    in_virtual_time(scenario)


def test_any_error_of_ray_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        ray = AwayRay()
        ours = made(FakeCoordinator(), ray)
        collecting = asyncio.create_task(ours.orphans.collect_forever())
        ray.actors["an engine of nobody"] = ready_answer(3, 1)

        async def fail(namespace: str) -> list[str]:
            raise RuntimeError("Ray is not well")

        with monkeypatch.context() as patch:
            patch.setattr(ray, "actor_names", fail)
            ours.orphans.suspect("a test")
            await asyncio.sleep(10)
            left = ours.orphans.leftovers()
            assert left is not None and left.reason == "Ray is not well"
        await asyncio.sleep(60)
        assert not ray.actors and not collecting.done()
        collecting.cancel()

    in_virtual_time(scenario)


def test_a_cancelled_start_forgets_no_orphan() -> None:
    """The start looks for orphans while the collector waits for its next attempt."""

    async def scenario() -> None:
        ray = AwayRay()
        ray.actors["an engine of nobody"], ray.away = ready_answer(3, 1), True
        orphans = OrphanCollector(ray, "swell", list, _always, 1000.0)
        orphans.suspect("one is left")
        for _ in range(4):
            await orphans.collect()
        forever = asyncio.create_task(orphans.collect_forever())
        await asyncio.sleep(GCS_S + 1.0)
        start = asyncio.create_task(orphans.collect())
        await asyncio.sleep(1.0)
        start.cancel()
        ray.away = False
        await asyncio.sleep(600.0)
        assert orphans.is_done and not ray.actors
        forever.cancel()

    in_virtual_time(scenario)


@pytest.mark.parametrize("what", ["create_group", "create_engine"])
@pytest.mark.parametrize("cancelled", [False, True])
def test_actors_and_groups_created_after_their_wait_are_removed(
    monkeypatch: pytest.MonkeyPatch, what: str, cancelled: bool
) -> None:
    async def scenario() -> None:
        ray = AwayRay()
        ours = made(FakeCoordinator(), ray)
        collecting = asyncio.create_task(ours.orphans.collect_forever())
        handle, make = ours.plan(3, VERSION), getattr(ray, what)

        async def make_late(*args: Any, **options: Any) -> str:
            ray.away = True
            made: str = await make(*args, **options)
            return made

        monkeypatch.setattr(ray, what, make_late)
        starting = asyncio.create_task(ours.start(handle, ignore))
        if cancelled:
            await asyncio.sleep(GCS_S / 2)
            starting.cancel()
            ray.away = False
            with pytest.raises(asyncio.CancelledError):
                await starting
            await ours.end(handle)
        else:
            with pytest.raises(StartFailed, match="does not answer"):
                await starting
            ray.away = False
        await asyncio.sleep(60)
        assert not ray.actors and not ray.reserved and ours.orphans.leftovers() is None
        collecting.cancel()

    in_virtual_time(scenario)


def test_the_state_reports_an_unavailable_gcs_and_the_next_retry() -> None:
    async def scenario(harness: ManagerHarness) -> None:
        await harness.start()
        writer = harness.manager._checkpoints
        harness.checkpoints.away = True
        confirming = asyncio.create_task(writer.confirm_leader())
        await asyncio.sleep(25)
        assert "has not answered for 2" in (harness.manager.error or "")
        assert "next try is in" in ((await harness.manager.describe())["rescale"]["error"] or "")
        harness.checkpoints.away = False
        assert await confirming and harness.manager.error is None
        await asyncio.sleep(2 * START_S)

    run(scenario)


def test_the_store_is_polled_with_growing_delays() -> None:
    async def scenario() -> None:
        store, config = FakeCheckpointStore("configuration"), load({"model": {"path": "m"}})
        store.away, reads = True, 0
        owner = store.owner

        async def counted() -> str:
            nonlocal reads
            reads += 1
            return await owner()

        store.owner = counted  # type: ignore[method-assign]
        writer = CheckpointWriter(store, config, ThreadRuntime())  # type: ignore[arg-type]
        confirming = asyncio.create_task(writer.confirm_leader())
        await asyncio.sleep(600)
        assert 50 < reads < 80
        store.away = False
        await asyncio.sleep(15 + config.cluster.stall_timeout_s)
        assert confirming.done()
        assert writer.error is None

    in_virtual_time(scenario)


async def _always() -> bool:
    return True


def test_the_collector_finds_actors_that_appear_later() -> None:
    """A call of a dead manager takes effect after its successor has looked for orphans."""

    async def scenario() -> None:
        ray, leads = AwayRay(), [True]

        async def may_end() -> bool:
            return leads[0]

        orphans = OrphanCollector(ray, "swell", list, may_end, 30.0)
        forever = asyncio.create_task(orphans.collect_forever())
        await asyncio.sleep(1.0)
        ray.actors["late"] = ready_answer(3, 1)
        leads[0] = False
        await asyncio.sleep(60.0)
        assert "late" in ray.actors, "another manager leads, and it may be that one's"
        leads[0] = True
        await asyncio.sleep(31.0)
        assert "late" not in ray.actors and orphans.is_done

        async def silent(namespace: str) -> list[str]:
            raise GcsUnavailable("the GCS does not answer")

        ray.actor_names = silent  # type: ignore[method-assign, assignment]
        await asyncio.sleep(100.0)
        assert orphans.leftovers() is None, "nothing is suspected"
        forever.cancel()

    in_virtual_time(scenario)


@pytest.mark.parametrize("what", ["create_group", "create_engine"])
def test_actors_created_during_shutdown_are_killed_with_it(
    monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """No collector is running any more at that time."""

    async def scenario() -> None:
        ray = AwayRay()
        ours = made(FakeCoordinator(), ray)
        handle, make = ours.plan(3, VERSION), getattr(ray, what)

        async def make_slowly(*args: Any, **options: Any) -> str:
            made: str = await make(*args, **options)
            await asyncio.sleep(1.0)
            return made

        monkeypatch.setattr(ray, what, make_slowly)
        starting = asyncio.create_task(ours.start(handle, ignore))
        await asyncio.sleep(0.5)
        assert ray.reserved
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await ours.close([handle])
        assert not ray.actors and not ray.reserved

    in_virtual_time(scenario)
