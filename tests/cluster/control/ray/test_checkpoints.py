"""The checkpoint that a manager writes for its successor, and what an earlier manager can still do
to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from swell.cluster.control.plan.checkpoint import ClusterCheckpoint
from swell.cluster.control.plan.versions import UpgradeRecord
from swell.cluster.control.ray.checkpoint_store import CheckpointStore
from swell.cluster.control.ray.checkpoint_writer import CheckpointWriter
from swell.configs.schema import load
from swell.coordinator.manager_state import DesiredState
from swell.coordinator.transport.runtime import ThreadRuntime
from tests.cluster.control.ray.fake_ray import FakeRay

CLUSTER_ID = "configuration"
CONFIG = load({"model": {"path": "m"}})


class SlowRay(FakeRay):
    """If `holds`, the next overwriting write takes effect only when `arrive` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.arrive = asyncio.Event()
        self.holds = False
        self.held = asyncio.Event()

    async def kv_put(self, key: bytes, value: bytes, *, overwrite: bool = True) -> bool:
        if overwrite and self.holds:
            self.holds = False
            self.held.set()
            await self.arrive.wait()
        return await super().kv_put(key, value, overwrite=overwrite)


def writer(ray: FakeRay, cluster_id: str = CLUSTER_ID) -> CheckpointWriter:
    store = CheckpointStore("swell-app", cluster_id, ray)
    return CheckpointWriter(store, CONFIG, ThreadRuntime())


async def save(manager: CheckpointWriter, target: int) -> bool:
    return await manager.save(
        manager.make(DesiredState(target=target, served=True), UpgradeRecord(), ())
    )


async def take_over(manager: CheckpointWriter) -> ClusterCheckpoint:
    await manager.claim()
    return await manager.take_over(DesiredState())


async def begin(manager: CheckpointWriter, target: int) -> bool:
    await take_over(manager)
    return await save(manager, target)


async def newest(ray: FakeRay) -> ClusterCheckpoint:
    return await CheckpointStore("swell-app", CLUSTER_ID, ray).read()


Scenario = Callable[[SlowRay], Awaitable[None]]


@pytest.fixture
def run() -> Callable[[Scenario], None]:
    async def whole(scenario: Scenario) -> None:
        await scenario(SlowRay())

    return lambda scenario: asyncio.run(whole(scenario))


def test_the_most_recent_manager_leads(run) -> None:
    async def scenario(ray: SlowRay) -> None:
        first, second = writer(ray), writer(ray)
        assert (await take_over(first)).desired.target == 0
        assert await first.is_leader()
        assert await save(first, 2) and await save(first, 3)
        assert (await take_over(second)).desired.target == 3
        assert await save(second, 4)
        assert await second.is_leader() and not await first.is_leader()
        assert not await save(first, 5)
        assert ((await newest(ray)).desired.target, (await newest(ray)).desired.owner) == (
            4,
            second.owner,
        )
        assert len(await ray.kv_keys(b"swell-app:")) == 1, "nothing of the first is left"

    run(scenario)


def test_a_write_of_an_earlier_manager_that_arrives_late_changes_nothing(run) -> None:
    async def scenario(ray: SlowRay) -> None:
        first, second = writer(ray), writer(ray)
        await begin(first, 2)
        ray.holds = True
        late = asyncio.create_task(save(first, 3))
        await ray.held.wait()
        await begin(second, 5)
        ray.arrive.set()
        assert not await late
        assert (await newest(ray)).desired.target == 5
        assert await second.is_leader() and not await first.is_leader()

    run(scenario)


def test_concurrent_takeovers_have_one_leader(run) -> None:
    async def scenario(ray: SlowRay) -> None:
        managers = [writer(ray) for _ in range(5)]
        await asyncio.gather(*(begin(manager, n) for n, manager in enumerate(managers, 1)))
        leads = [await manager.is_leader() for manager in managers]
        assert leads.count(True) == 1
        assert (await newest(ray)).desired.target == leads.index(True) + 1

    run(scenario)


def test_applications_are_separate_and_deleted_completely(run) -> None:
    async def scenario(ray: SlowRay) -> None:
        manager, other = writer(ray), CheckpointStore("swell-app-2", CLUSTER_ID, ray)
        await begin(manager, 2)
        await other.claim("other", 0)
        await other.write(ClusterCheckpoint(DesiredState(target=7)))
        await manager.clear()
        assert await newest(ray) == ClusterCheckpoint() and (await other.read()).desired.target == 7

    run(scenario)
