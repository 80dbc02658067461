"""The assumptions of the control plane about Ray, tested with each implementation of
`RayInterface`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator

import pytest

from swell.cluster.control.ray.actor_errors import ActorDied, ActorError, ActorRaised
from swell.coordinator.actor import Coordinator
from swell.engine.serving.actor import EngineActor
from tests.cluster.control.ray.contract_cluster import (
    OTHER_HOST,
    VERSION,
    Cluster,
    World,
)
from tests.cluster.control.ray.real_ray import RealRay, groups_of
from tests.simulator.simulated_ray.ray_actor import Concurrency
from tests.simulator.simulated_ray.ray_interface import COORDINATOR_CALLS, ENGINE_CALLS
from tests.simulator.simulated_ray.ray_world import SimRayWorld
from tests.support.deadlines import HANG_S

WORLDS: dict[str, Callable[[], World]] = {"real": RealRay, "simulated": SimRayWorld}


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "real")) for name in WORLDS],
)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = WORLDS[request.param]()
    yield made
    made.close()


NEVER_S = 3.0
"""Seconds without an event after which it is assumed that none will come."""

Scenario = Callable[[Cluster], Awaitable[None]]


@pytest.fixture
def run(world: World) -> Callable[[Scenario], None]:
    async def whole(scenario: Scenario) -> None:
        cluster = Cluster(world)
        try:
            await scenario(cluster)
        finally:
            await cluster.close()

    return lambda scenario: world.run(whole(scenario))


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(HANG_S):
        while not await condition():
            await asyncio.sleep(0.05)


async def becomes(read: Callable[[], Awaitable[list[str]]], wanted: list[str]) -> None:
    async with asyncio.timeout(HANG_S):
        while await read() != wanted:
            await asyncio.sleep(0.05)


# -------------------------------------------------------------------------------- actors


def test_actors_have_names_in_a_namespace(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        ray = cluster.ray
        second, first = await cluster.engine("engine-b", 7), await cluster.engine("engine-a")
        await cluster.coordinator("coordinator")
        assert await cluster.names() == ["coordinator", "engine-a", "engine-b"]
        found = await ray.find_actor("engine-b", cluster.namespace)
        assert await ray.call(found, "pid") == await ray.call(second, "pid")
        assert (await ray.call(found, "arguments"))[1:] == (7, VERSION)
        assert await ray.find_actor("engine-b", f"{cluster.namespace}-other") is None
        assert await ray.find_actor("engine-c", cluster.namespace) is None
        with pytest.raises(ValueError, match="engine-a"):
            await cluster.engine_in(cluster._groups[0], "engine-a")
        assert await ray.call(first, "pid") != await ray.call(second, "pid")

    run(scenario)


def test_errors_of_a_method_keep_their_cause(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        engine = await cluster.engine("engine")
        with pytest.raises(ActorRaised, match=r"^nothing here$") as caught:
            await cluster.ray.call(engine, "fail", "nothing here")
        assert isinstance(caught.value.cause, LookupError)
        assert await cluster.ray.call(engine, "pid")

    run(scenario)


def test_a_call_is_sent_without_an_await_and_survives_a_cancelled_wait(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        engine = await cluster.engine("engine")
        assert await cluster.ray.call(engine, "pid"), "it has started"
        cluster.ray.call(engine, "note", "unawaited", 0.0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(cluster.ray.call(engine, "note", "cancelled", HANG_S), 0.01)

        await _noted(cluster, "unawaited")
        await _noted(cluster, "cancelled")

    run(scenario)


def test_calls_that_wait_for_the_end_of_an_engine_do_not_block_others(run) -> None:
    """Ray does not cancel the calls of managers that have terminated."""

    async def scenario(cluster: Cluster) -> None:
        engine = await cluster.engine("engine")
        waiting = [
            asyncio.ensure_future(cluster.ray.call(engine, "ended", 2 * HANG_S)) for _ in range(40)
        ]
        assert await asyncio.wait_for(cluster.ray.call(engine, "pid"), HANG_S)
        assert not any(call.done() for call in waiting)
        await cluster.ray.kill(engine)
        for answer in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(answer, ActorDied)

    run(scenario)


@pytest.mark.parametrize(
    ("actor", "simulated"), [(EngineActor, ENGINE_CALLS), (Coordinator, COORDINATOR_CALLS)]
)
def test_simulated_actors_execute_as_many_calls_as_ours(actor, simulated) -> None:
    options = actor._default_options
    assert simulated == Concurrency(
        options["max_concurrency"], options["concurrency_groups"], groups_of(actor)
    )


def test_an_engine_that_dies_stays_dead_and_leaves_its_group(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        ray, engine = cluster.ray, await cluster.engine("engine")
        pid = await ray.call(engine, "pid")
        call = asyncio.ensure_future(ray.call(engine, "note", "dying", HANG_S))
        await _noted(cluster, "dying")
        await ray.kill_process(pid, ray.node_id)
        with pytest.raises(ActorDied):
            await call
        with pytest.raises(ActorDied):
            await ray.call(engine, "pid")
        await becomes(cluster.names, [])
        assert await cluster.groups() == [f"{cluster.namespace}-engine"]
        assert cluster.world.notes().count("dying") == 1
        await ray.kill(engine)
        await ray.kill_process(pid, ray.node_id)

    run(scenario)


def test_a_killed_name_is_free_although_its_process_may_still_run(run) -> None:
    """The process is suspended and cannot exit by itself."""

    async def scenario(cluster: Cluster) -> None:
        ray, engine = cluster.ray, await cluster.engine("engine")
        pid = await ray.call(engine, "pid")
        cluster.world.stop_process(pid)
        try:
            await ray.kill(engine)
            assert await cluster.names() == []
            assert await ray.find_actor("engine", cluster.namespace) is None
            successor = await cluster.engine_in(cluster._groups[0], "engine")
            lived = cluster.world.process_lives(pid)
            assert await ray.call(successor, "pid") != pid
            assert lived
        finally:
            await ray.kill_process(pid, ray.node_id)

    run(scenario)


def test_a_stopped_process_of_another_host_is_killed_there(run, world) -> None:
    """Ray would first ask the process to exit, for seconds, while its memory stays in use."""
    node = world.add_host()

    async def scenario(cluster: Cluster) -> None:
        ray, engine = cluster.ray, await cluster.engine("engine", kind=OTHER_HOST)
        pid = await ray.call(engine, "pid")
        cluster.world.stop_process(pid)

        async def is_killed() -> bool:
            with contextlib.suppress(ActorError):  # a busy host starts the helper too late
                await ray.kill_process(pid, node)
                return True
            return False

        await eventually(is_killed)
        assert not cluster.world.process_lives(pid)
        with pytest.raises(ActorDied):
            await ray.call(engine, "pid")
        with pytest.raises(ActorError):
            await ray.kill_process(pid, "0" * len(node))

    run(scenario)


def test_actors_are_killed_with_their_group(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        ray, engine = cluster.ray, await cluster.engine("engine")
        pid = await ray.call(engine, "pid")
        await ray.remove_group(cluster._groups[0])
        await becomes(cluster.names, [])
        with pytest.raises(ActorDied):
            await ray.call(engine, "pid")

        async def ended() -> bool:
            return not cluster.world.process_lives(pid)

        await eventually(ended)

    run(scenario)


def test_an_actor_of_a_removed_group_never_starts_and_keeps_its_name(run) -> None:
    """The request to create the actor may arrive late."""

    async def scenario(cluster: Cluster) -> None:
        ray, group = cluster.ray, await cluster.group(f"{cluster.namespace}-engine")
        assert await ray.wait_for_group(group, HANG_S)
        await ray.remove_group(group)
        engine = await cluster.engine_in(group, "engine")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ray.call(engine, "pid"), NEVER_S)
        assert await cluster.names() == ["engine"]
        await ray.kill(engine)
        await becomes(cluster.names, [])

    run(scenario)


async def _noted(cluster: Cluster, text: str) -> None:
    async def noted() -> bool:
        return text in cluster.world.notes()

    await eventually(noted)


# -------------------------------------------------------------------------------- the coordinator


def test_a_coordinator_is_created_once(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        ray = cluster.ray
        first = await cluster.coordinator("coordinator")
        second = await cluster.coordinator("coordinator", "x")
        assert await ray.call(first, "pid") == await ray.call(second, "pid")
        assert (await ray.call(second, "arguments"))[2].name == "first"

    run(scenario)


@pytest.mark.parametrize("killed", ["process", "actor"])
def test_a_coordinator_is_restarted_and_pending_calls_run_twice(run, killed) -> None:
    async def scenario(cluster: Cluster) -> None:
        ray, actor = cluster.ray, await cluster.coordinator("coordinator")
        pid, text = await ray.call(actor, "pid"), f"repeated-{killed}"
        call = asyncio.ensure_future(ray.call(actor, "note", text, HANG_S))
        await _noted(cluster, text)
        if killed == "process":
            await ray.kill_process(pid, ray.node_id)
        else:
            await ray.kill(actor, restart=True)
        assert await cluster.names() == ["coordinator"]
        while_away = ray.call(actor, "pid")
        successor = await call
        assert successor != pid
        assert await while_away in (pid, successor), "a process that is killed may still answer"
        assert cluster.world.notes().count(text) == 2
        assert await cluster.names() == ["coordinator"]

    run(scenario)


def test_a_killed_stopped_coordinator_is_restarted(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        ray, actor = cluster.ray, await cluster.coordinator("coordinator")
        pid = await ray.call(actor, "pid")
        cluster.world.stop_process(pid)
        try:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ray.call(actor, "pid"), 1.0)
            await ray.kill(actor, restart=True)
            assert await ray.call(actor, "pid") != pid
        finally:
            await ray.kill_process(pid, ray.node_id)

    run(scenario)


def test_a_coordinator_that_was_removed_is_not_restarted(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        ray, actor = cluster.ray, await cluster.coordinator("coordinator")
        pid = await ray.call(actor, "pid")
        await ray.kill(actor)
        assert await cluster.names() == []
        with pytest.raises(ActorDied):
            await ray.call(actor, "pid")
        await ray.kill(actor)
        successor = await cluster.coordinator("coordinator", "second")
        assert await ray.call(successor, "pid") != pid
        assert (await ray.call(successor, "arguments"))[2].name == "second"

    run(scenario)


# -------------------------------------------------------------------------------- resources


def test_groups_are_listed_with_their_names_until_they_are_removed(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        ray, one, two = cluster.ray, f"{cluster.namespace}-1", f"{cluster.namespace}-2"
        second, first = await cluster.group(two), await cluster.group(one)
        assert await cluster.groups() == [one, two]
        with pytest.raises(RuntimeError, match=one):
            await cluster.group(one)
        await ray.remove_group(first)
        await ray.remove_group(first)
        await becomes(cluster.groups, [two])
        found = (await ray.groups())[two]
        assert await ray.wait_for_group(found, HANG_S)
        again = await cluster.group(one)
        assert await ray.wait_for_group(again, HANG_S), "the name is free again"
        await ray.remove_group(found)
        await ray.remove_group(second)
        await becomes(cluster.groups, [one])

    run(scenario)


def test_a_group_waits_for_its_resources_and_releases_them(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        ray, all_cpus = cluster.ray, cluster.world.num_cpus

        async def free() -> bool:
            return (await ray.free_resources()).get("CPU", 0.0) == all_cpus

        await eventually(free)
        assert ray.total_resources()["CPU"] == all_cpus
        first = await cluster.group(f"{cluster.namespace}-1", all_cpus)
        assert await ray.wait_for_group(first, HANG_S)
        assert (await ray.free_resources()).get("CPU", 0.0) < all_cpus
        second = await cluster.group(f"{cluster.namespace}-2", 1.0)
        assert not await ray.wait_for_group(second, 0.5)
        assert len(await cluster.groups()) == 2
        await ray.remove_group(first)
        assert await ray.wait_for_group(second, HANG_S)
        await ray.remove_group(second)
        await eventually(free)

    run(scenario)


# -------------------------------------------------------------------------------- keys and values


def test_keys_and_values_survive_their_writer(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        ray, prefix = cluster.ray, cluster.namespace.encode()
        one, two = prefix + b":b", prefix + b":a"
        assert await ray.kv_get(one) is None and await ray.kv_keys(prefix) == []
        assert await ray.kv_put(one, b"1", overwrite=False)
        assert not await ray.kv_put(one, b"2", overwrite=False)
        assert await ray.kv_get(one) == b"1"
        assert await ray.kv_put(one, b"3") and await ray.kv_put(two, b"")
        assert (await ray.kv_get(one), await ray.kv_get(two)) == (b"3", b"")
        assert await ray.kv_keys(prefix) == [two, one]
        assert await ray.kv_keys(prefix + b":b") == [one]
        await ray.kv_put(prefix + b"-other:a", b"4")
        await ray.kv_delete(prefix + b":")
        assert await ray.kv_keys(prefix) == [prefix + b"-other:a"]
        await ray.kv_delete(prefix)

    run(scenario)


# -------------------------------------------------------------------------------- this host


def test_each_endpoint_is_unique(run) -> None:
    async def scenario(cluster: Cluster) -> None:
        first, second = cluster.ray.new_endpoint(), cluster.ray.new_endpoint()
        assert first.keys.public != second.keys.public
        assert first.name != second.name and 0 < first.port < 65536

    run(scenario)
