"""A failure is injected into each background loop of an ingress and of the manager. Either only one
message is lost, or the process exits. No request hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette

from swell.cluster.api.server.http_server import EdgeServer
from swell.cluster.app import IngressDeployment, ManagerDeployment, StoreDeployment
from swell.cluster.client.requests.output_processor import OutputProcessor
from swell.configs.schema import ServeConfig
from swell.coordinator import roster as rosters
from tests.cluster.control.fake_manager import ManagerHarness, run
from tests.cluster.fake_cluster import FakeCluster, Stream, body, truth, until
from tests.cluster.text import tokenizers_for_tests
from tests.conftest import Deaths
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def planted(*_args: Any, **_kwargs: Any) -> Any:
    raise ZeroDivisionError("planted")


def first_times(times: int, call: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `call`, except that its first `times` calls fail."""
    left = [None] * times

    def run_it(*args: Any, **kwargs: Any) -> Any:
        if left:
            left.pop()
            planted()
        return call(*args, **kwargs)

    return run_it


async def check(deaths: Deaths, loop: str) -> None:
    await until(lambda: deaths)
    assert {name for name, _ in deaths} == {loop}
    assert all(isinstance(error, ZeroDivisionError) for _, error in deaths)
    deaths.clear()


def test_outputs_that_cannot_be_handled_are_computed_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = first_times(3, OutputProcessor.process_outputs)

    async def case() -> None:
        async with FakeCluster(folder).serving() as cluster:
            await cluster.join(0)
            monkeypatch.setattr(OutputProcessor, "process_outputs", lambda *a: process(*a))
            streams = [Stream(cluster, body([number], 20)) for number in range(3)]
            for number, stream in enumerate(streams):
                await asyncio.wait_for(stream.done, HANG_S)
                assert stream.ids == truth([number], 20) and stream.error is None

    asyncio.run(case())


def test_a_view_that_fails_to_apply_is_applied_when_it_is_resent(folder: Path) -> None:
    """Requests of the engine that left are not lost in the meantime."""

    async def case() -> None:
        async with FakeCluster(folder).serving() as cluster:
            first = await cluster.join(0, steps=3)
            stream = Stream(cluster, body([1], 20))
            await stream.has(3)
            second = cluster.start(1)
            llm, links = cluster.ingress.llm, cluster.ingress.llm._client
            llm.on_view = first_times(1, llm.on_view)  # type: ignore[method-assign]
            await asyncio.to_thread(first.close)
            roster = rosters.join(cluster.coordinator.view.roster, [second.member])
            cluster.coordinator.publish(roster=rosters.remove(roster, [0]))
            await until(lambda: links._failed_views)  # type: ignore[attr-defined]
            cluster.coordinator.publish()  # the coordinator's heartbeat
            await asyncio.wait_for(stream.done, HANG_S)
            assert stream.ids == truth([1], 20)

    asyncio.run(case())


def test_an_ingress_that_can_apply_no_view_exits(folder: Path, deaths: Deaths) -> None:
    async def case() -> None:
        async with FakeCluster(folder).serving() as cluster:
            await cluster.join(0)
            llm = cluster.ingress.llm
            llm.on_view = planted  # type: ignore[method-assign, assignment]
            while not deaths:
                cluster.coordinator.publish()
                await asyncio.sleep(0.01)
            del llm.on_view  # type: ignore[method-assign]
            await check(deaths, "channel")

    asyncio.run(case())


def test_an_ingress_without_its_heartbeat_task_exits(folder: Path, deaths: Deaths) -> None:
    async def case() -> None:
        async with FakeCluster(folder).serving() as cluster:
            cluster.ingress.llm._client._metrics = None  # type: ignore[attr-defined]
            await until(lambda: deaths)
            [(loop, error)] = deaths
            assert loop == "ingress: heartbeat" and isinstance(error, AttributeError)
            deaths.clear()

    asyncio.run(case())


def test_an_ingress_that_stops_listening_exits(deaths: Deaths) -> None:
    async def case() -> None:
        edge = EdgeServer(Starlette(), "127.0.0.1", 0, 5, ServeConfig())
        await edge.start()
        edge._server.on_tick = planted  # type: ignore[method-assign]
        await check(deaths, "HTTP server")
        with pytest.raises(ZeroDivisionError):
            await edge.stop()
        edge._socket.close()

    asyncio.run(case())


def test_a_manager_without_its_loop_exits(deaths: Deaths) -> None:
    """Otherwise no engine would be started any more, while scale requests were still accepted."""

    async def scenario(world: ManagerHarness) -> None:
        await world.start()
        save = world.coordinator.save_manager_state
        world.coordinator.save_manager_state = planted  # type: ignore[method-assign]
        world.manager._wake.set()
        for _ in range(100):
            await asyncio.sleep(0.05)
        world.coordinator.save_manager_state = save  # type: ignore[method-assign]
        [(loop, error)] = deaths
        assert loop == "manager: reconcile" and isinstance(error, ZeroDivisionError)
        deaths.clear()

    run(scenario)


@pytest.mark.parametrize("way", ["end", "kill"])
def test_an_engine_that_cannot_be_killed_is_replaced(way: str) -> None:
    async def scenario(world: ManagerHarness) -> None:
        await world.start()
        end = getattr(world.placement, way)

        async def fail(handle: Any) -> None:
            await end(handle)
            planted()

        setattr(world.placement, way, fail)
        if way == "end":
            world.placement.kill_engine(0)
        else:
            world.coordinator.report_stalled(0)
        await asyncio.sleep(60)
        setattr(world.placement, way, end)
        await world.settle()
        assert world.active == [0, 1] and world.manager.phase == "idle"

    run(scenario, data=2)


def test_engines_that_left_and_cannot_be_killed_delay_no_change() -> None:
    async def scenario(world: ManagerHarness) -> None:
        await world.start()
        end, world.placement.end = world.placement.end, planted  # type: ignore[method-assign]
        await world.manager.scale(1)
        await asyncio.sleep(60)
        world.placement.end = end  # type: ignore[method-assign]
        (stuck,) = [p.handle for p in world.placement.processes.values() if p.handle.rank == 1]
        await end(stuck)
        assert world.manager._fleet.ending == {}
        await world.manager.scale(2)
        await world.settle()
        assert world.active == [0, 1]

    run(scenario, data=2)


@pytest.mark.parametrize("turns", range(6))
def test_a_manager_cancelled_while_it_wakes_stops(turns: int) -> None:
    """The cancellation arrives while the manager waits for a time, e.g. before a retry."""

    async def scenario(world: ManagerHarness) -> None:
        await world.start()
        world.manager._reconcile = lambda: 5.0  # type: ignore[method-assign]
        world.manager._wake.set()
        await asyncio.sleep(1)
        world.manager._wake.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(1000):
            await world.manager.stop()

    run(scenario)


def test_serves_health_check_runs_in_the_ingress_loop() -> None:
    """Without our own method, Serve's health check runs in another thread, which answers even if
    this loop hangs."""
    for deployment in (ManagerDeployment, IngressDeployment, StoreDeployment):
        assert asyncio.iscoroutinefunction(deployment.check_health)


@pytest.mark.parametrize("leads", [True, False])
def test_a_replaced_manager_is_not_healthy(leads: bool) -> None:
    """Serve stops such a manager, and starts a new one if there is no other."""
    deployment = SimpleNamespace(_manager=SimpleNamespace(leads=leads))
    with nullcontext() if leads else pytest.raises(RuntimeError, match="has taken over"):
        asyncio.run(ManagerDeployment.check_health(deployment))  # type: ignore[arg-type]
