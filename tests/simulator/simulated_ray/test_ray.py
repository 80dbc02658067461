"""Properties of the simulated Ray besides the contract: an unavailable GCS, and lost hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from swell.cluster.control.ray.actor_errors import ActorDied, ActorUnavailable, GcsUnavailable
from swell.configs.schema import ClusterConfig, load
from swell.coordinator.transport.channel import ChannelKeys
from tests.simulator.kernel.kernel import WORLD, Kernel
from tests.simulator.kernel.process import Process
from tests.simulator.network.network import Network
from tests.simulator.simulated_ray.ray import RayOptions, SimRayCluster
from tests.simulator.simulated_ray.ray_actor import Failure, SimActor
from tests.simulator.simulated_ray.ray_interface import COORDINATOR_CALLS, SimRay

CONFIG = load({"model": {"path": "m"}})
KEYS = ChannelKeys(b"public", b"secret")
OPTIONS = RayOptions()


class Actor:
    """An actor that returns its process, and whether it was restarted."""

    def __init__(self, process: Process, again: bool) -> None:
        self._process, self._again = process, again

    def where(self) -> tuple[str, str, bool]:
        return self._process.name, self._process.host, self._again

    async def wait(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return self._process.name

    async def later(self, seconds: float) -> str:
        return await self.wait(seconds)

    async def note(self, notes: list[str]) -> None:
        notes.append("begins")
        await self.wait(1.0)
        notes.append("ends")


class RayHosts:
    """Three hosts with two CPUs each, and a manager on the second one."""

    def __init__(self) -> None:
        self.kernel = Kernel(0)
        self.net = Network(self.kernel)
        nodes = {f"host{i}": {"CPU": 2.0} for i in range(3)}
        make = lambda process, again, *_: Actor(process, again)  # noqa: E731
        self.cluster = SimRayCluster(self.kernel, self.net, nodes, make, make)
        self.manager = Process(self.kernel, "manager", "host1")
        self.ray = SimRay(self.cluster, self.manager)

    def run(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        tasks: list[asyncio.Task[None]] = []

        def start() -> None:
            tasks.append(self.manager.loop.create_task(work()))
            tasks[0].add_done_callback(lambda _: self.kernel.halt())

        self.kernel.soon(self.manager, start)
        assert self.kernel.run(1000.0)
        tasks[0].result()
        assert self.kernel.failures == []

    async def at(self, host: str, work: Callable[[SimRay], Awaitable[Any]]) -> Any:
        """Runs `work` in a process on this host. Returns its result."""
        process = Process(self.kernel, "other", host)
        done = asyncio.get_running_loop().create_future()

        async def run() -> None:
            result = await work(SimRay(self.cluster, process))
            self.kernel.soon(self.manager, done.set_result, result)

        self.kernel.soon(process, lambda: process.loop.create_task(run()))
        return await done

    def later(self, seconds: float, call: Callable[..., Any], *args: Any) -> None:
        self.kernel.at(self.kernel.now + seconds, WORLD, call, *args)

    async def engine(self, name: str, cpus: float = 2.0) -> SimActor:
        group = await self.ray.create_group(name, {"CPU": cpus}, 1)
        return await self.ray.create_engine(name, "ns", group, 0, CONFIG, 0, "")

    async def coordinator(self) -> SimActor:
        endpoint = self.ray.new_endpoint()
        return await self.ray.get_or_create_coordinator(
            "coordinator", "ns", ClusterConfig(), False, endpoint, False
        )

    def isolate(self, host: str) -> None:
        self.net.isolate(host, [f"host{i}" for i in range(3)])

    def reunite(self, host: str) -> None:
        self.net.reunite(host, [f"host{i}" for i in range(3)])


def test_a_request_fails_during_a_gcs_outage_and_a_write_may_be_applied_later() -> None:
    hosts = RayHosts()

    async def work() -> None:
        ray = hosts.ray
        await ray.kv_put(b"key", b"1")
        hosts.cluster.set_away(True)
        begun = hosts.kernel.now
        with pytest.raises(TimeoutError):
            await ray.kv_put(b"key", b"2")
        assert hosts.kernel.now - begun == pytest.approx(OPTIONS.gcs_timeout_s)
        with pytest.raises(TimeoutError):
            await ray.actor_names("ns")
        hosts.later(1.0, hosts.cluster.set_away, False)
        assert await ray.kv_put(b"key", b"3")
        assert await ray.kv_get(b"key") == b"3"

    hosts.run(work)


def test_a_failed_change_during_a_gcs_outage_is_applied_before_later_ones() -> None:
    hosts = RayHosts()

    async def work() -> None:
        group = await hosts.ray.create_group("engine", {"CPU": 1.0}, 1)
        hosts.cluster.set_away(True)
        with pytest.raises(GcsUnavailable):
            await hosts.ray.create_engine("engine", "ns", group, 0, CONFIG, 0, "")
        hosts.later(1.0, hosts.cluster.set_away, False)
        assert await hosts.ray.actor_names("ns") == ["engine"]

    hosts.run(work)


@pytest.mark.parametrize("isolated", [False, True])
def test_a_helper_kills_a_stopped_process_of_another_host(isolated: bool) -> None:
    hosts = RayHosts()

    async def work() -> None:
        ray = hosts.ray
        engine = await hosts.engine("engine")
        await ray.call(engine, "where")
        process = engine.process
        assert process is not None and process.host == "host0" != ray.node_id
        process.stop()
        pid = hosts.cluster.pid_of(process)
        if isolated:
            hosts.isolate(ray.node_id)
            with pytest.raises(GcsUnavailable):
                await ray.kill_process(pid, process.host)
        else:
            await ray.kill_process(pid, process.host)
        assert process.alive == isolated

    hosts.run(work)


def test_actor_calls_work_without_the_gcs() -> None:
    hosts = RayHosts()

    async def work() -> None:
        engine = await hosts.engine("engine")
        assert await hosts.ray.call(engine, "where")
        hosts.cluster.set_away(True)
        assert await asyncio.wait_for(hosts.ray.call(engine, "where"), 0.1)

    hosts.run(work)


def test_a_death_is_detected_late_and_later_without_the_gcs() -> None:
    hosts = RayHosts()

    async def work() -> None:
        ray, engine = hosts.ray, await hosts.engine("engine")
        await ray.call(engine, "where")
        hosts.cluster.set_away(True)
        hosts.later(5.0, hosts.cluster.set_away, False)
        assert engine.process is not None
        engine.process.kill()
        begun = hosts.kernel.now
        with pytest.raises(ActorDied):
            await ray.call(engine, "where")
        assert 5.0 <= hosts.kernel.now - begun < 5.1
        assert await ray.actor_names("ns") == []

    hosts.run(work)


def test_engines_fill_the_hosts_and_wait_for_room() -> None:
    hosts = RayHosts()

    async def work() -> None:
        ray = hosts.ray
        engines = [await hosts.engine(f"engine{i}") for i in range(4)]
        where = [await ray.call(engine, "where") for engine in engines[:3]]
        assert [host for _, host, _ in where] == ["host0", "host1", "host2"]
        assert await ray.free_resources() == {}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ray.call(engines[3], "where"), 5.0)
        await ray.remove_group((await ray.groups())["engine1"])
        assert (await ray.call(engines[3], "where"))[1] == "host1"
        with pytest.raises(ActorDied):
            await ray.call(engines[1], "where")

    hosts.run(work)


def test_an_actor_runs_a_limited_number_of_calls_concurrently() -> None:
    hosts = RayHosts()

    async def work() -> None:
        ray, engine = hosts.ray, await hosts.engine("engine")
        await ray.call(engine, "where")
        waits = [ray.call(engine, "wait", 2.0) for _ in range(4)]
        begun = hosts.kernel.now
        await asyncio.sleep(0.01)
        await ray.call(engine, "where")
        assert hosts.kernel.now - begun == pytest.approx(2.0, abs=0.1)
        await asyncio.gather(*waits)

    hosts.run(work)


def test_a_cut_holds_calls_and_answers_back() -> None:
    hosts = RayHosts()

    async def work() -> None:
        ray, engine = hosts.ray, await hosts.engine("engine")
        assert (await ray.call(engine, "where"))[1] == "host0"
        hosts.net.cut("host0", "host1")
        hosts.later(3.0, hosts.net.heal, "host0", "host1")
        begun = hosts.kernel.now
        await ray.call(engine, "where")
        assert 3.0 <= hosts.kernel.now - begun < 3.3

    hosts.run(work)


def test_actors_of_a_lost_host_die_and_the_coordinator_moves() -> None:
    hosts = RayHosts()

    async def work() -> None:
        ray, cluster = hosts.ray, hosts.cluster
        engines = [await hosts.engine(f"engine{i}", 1.0) for i in range(6)]
        endpoint = ray.new_endpoint()
        actor = await hosts.at(
            "host2",
            lambda ray: ray.get_or_create_coordinator(
                "coordinator", "ns", ClusterConfig(), False, endpoint, False
            ),
        )
        assert await ray.call(actor, "where") == ("coordinator.1", "host2", False)
        assert (await ray.call(engines[5], "where"))[1] == "host2"
        begun = hosts.kernel.now
        cluster.lose_host("host2", list(cluster.processes.values()))
        assert await ray.call(actor, "where") == ("coordinator.2", "host0", True)
        assert OPTIONS.node_timeout_s <= hosts.kernel.now - begun < OPTIONS.node_timeout_s + 2
        with pytest.raises(ActorDied):
            await ray.call(engines[5], "where")
        assert ray.total_resources() == {"CPU": 4.0}
        for name in ("engine4", "engine5"):  # they would get resources of the new node
            await ray.remove_group((await ray.groups())[name])
        cluster.restore_host("host2", {"CPU": 2.0})
        assert (await ray.call(await hosts.engine("engine6", 2.0), "where"))[1] == "host2"

    hosts.run(work)


def test_a_host_with_power_becomes_a_node_when_its_link_works() -> None:
    hosts = RayHosts()

    async def work() -> None:
        cluster = hosts.cluster
        cluster.lose_host("host2", list(cluster.processes.values()))
        await asyncio.sleep(2 * OPTIONS.node_timeout_s)
        hosts.isolate("host2")
        cluster.restore_host("host2", {"CPU": 2.0})
        assert hosts.net.is_blocked("host0", "host2") and "host2" not in cluster.nodes
        hosts.reunite("host2")
        cluster.restore_host("host2", {"CPU": 2.0})
        assert not hosts.net.cuts and "host2" in cluster.nodes

    hosts.run(work)


def test_a_long_isolated_host_counts_as_dead_and_then_kills_its_processes() -> None:
    hosts = RayHosts()

    async def work() -> None:
        engines = [await hosts.engine(f"engine{i}") for i in range(3)]
        ray = SimRay(hosts.cluster, Process(hosts.kernel, "client", "host0"))
        for engine in engines:
            await hosts.ray.call(engine, "where")
        process = engines[2].process
        assert process is not None and process.host == "host2"
        hosts.isolate("host2")
        await asyncio.sleep(OPTIONS.node_timeout_s / 2)
        assert "engine2" in await hosts.ray.actor_names("ns")
        await asyncio.sleep(OPTIONS.node_timeout_s)
        assert await hosts.ray.actor_names("ns") == ["engine0", "engine1"]
        assert process.alive, "it knows nothing of it"
        hosts.reunite("host2")
        await asyncio.sleep(1.0)
        assert not process.alive
        assert ray.total_resources() == {"CPU": 4.0}

    hosts.run(work)


def test_a_short_cut_kills_nothing() -> None:
    hosts = RayHosts()

    async def work() -> None:
        engines = [await hosts.engine(f"engine{i}") for i in range(3)]
        await asyncio.sleep(5.0)
        for _ in range(3):
            hosts.isolate("host2")
            await asyncio.sleep(OPTIONS.node_timeout_s * 0.7)
            hosts.reunite("host2")
            await asyncio.sleep(0.1)
        for engine in engines:
            assert not (await hosts.ray.call(engine, "where"))[2]

    hosts.run(work)


def test_every_call_of_a_restarted_actor_is_answered() -> None:
    """Calls arrive at the next process of the actor although that has begun with them already, and
    others come while it is busy."""
    hosts = RayHosts()

    async def work() -> None:
        ray, limit = hosts.ray, COORDINATOR_CALLS.limit_of("")
        actor = await hosts.coordinator()
        await ray.call(actor, "where")
        process = actor.process
        assert process is not None
        hosts.cluster.slow_calls(30.0, hosts.kernel.now + 60.0)
        early = [asyncio.ensure_future(ray.call(actor, "later", 40.0)) for _ in range(3 * limit)]
        process.kill()
        await asyncio.sleep(61.0)
        late = [asyncio.ensure_future(ray.call(actor, "later", 1.0)) for _ in range(3 * limit)]
        async with asyncio.timeout(400.0):
            await asyncio.gather(*early, *late)

    hosts.run(work)


@pytest.mark.parametrize(
    ("failure", "fails_at_s", "runs"),
    [
        (Failure.LOST, 0.0, False),
        (Failure.LOST, 0.5, True),
        (Failure.RUNS, 0.0, True),
        (Failure.ANSWER_LOST, 0.0, True),
    ],
)
def test_a_single_call_fails_as_unavailable(
    failure: Failure, fails_at_s: float, runs: bool
) -> None:
    hosts = RayHosts()

    async def work() -> None:
        ray, notes = hosts.ray, list[str]()
        actor = await hosts.engine("engine")
        await ray.call(actor, "where")
        begun, noting = hosts.kernel.now, asyncio.ensure_future(ray.call(actor, "note", notes))
        await asyncio.sleep(fails_at_s)
        [call] = actor.calls
        actor.fail(call, failure)
        with pytest.raises(ActorUnavailable):
            await noting
        took_s = hosts.kernel.now - begun
        assert (took_s > 1.0) == (failure is Failure.ANSWER_LOST)
        await asyncio.sleep(2.0)
        assert notes == (["begins", "ends"] if runs else [])
        assert (await ray.call(actor, "where"))[1] == "host0"

    hosts.run(work)
