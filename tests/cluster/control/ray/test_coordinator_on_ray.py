"""The coordinator as an actor of the real Ray: where it listens, and how it is found again."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import ray
from ray._private.async_compat import has_async_methods

from swell.cluster.control.ray import coordinator_handle
from swell.cluster.control.ray.ray_cluster import RayCluster
from swell.configs.schema import load
from swell.coordinator.actor import Coordinator, find
from swell.engine.serving.actor import EngineActor
from swell.worker.actor import WorkerActor
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

NAMESPACE = "swell-app"
CONFIG = load("m", {"cluster.interface": "lo", "cluster.ports": "21600-21631"}).cluster


@pytest.fixture(scope="module")
def running_ray() -> Iterator[None]:
    """Starts Ray in a driver with another namespace, as `swell serve` and Serve's controller
    have."""
    folder = tempfile.mkdtemp(prefix="swell-test-", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=1,
        namespace="swell",
        include_dashboard=False,
        _temp_dir=folder,
        log_to_driver=False,
        logging_level=logging.CRITICAL,
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cluster(running_ray: None) -> RayCluster:
    return RayCluster(CONFIG)


def test_a_coordinator_uses_its_interface_and_ports_and_is_found(
    cluster: RayCluster,
) -> None:
    async def scenario() -> None:
        endpoint = cluster.new_endpoint()
        assert endpoint.host == "127.0.0.1"
        assert endpoint.port in range(21_600, 21_604)
        actor = await cluster.get_or_create_coordinator(
            "coordinator-1", NAMESPACE, CONFIG, False, endpoint, False
        )
        contact = await cluster.call(actor, "contact")
        assert contact.address.tcp == f"tcp://127.0.0.1:{endpoint.port}"
        assert await asyncio.to_thread(find, contact, 20.0) == contact
        await cluster.kill(actor)
        assert await asyncio.to_thread(find, contact, 1.0) is None

    asyncio.run(scenario())


def test_a_coordinator_on_another_host_uses_the_coordinator_ports(
    cluster: RayCluster,
) -> None:
    """Ray places the coordinator on another host if it does not fit on the manager's host."""

    async def scenario() -> None:
        chosen = msgspec.structs.replace(cluster.new_endpoint(), host="192.0.2.1")
        actor = await cluster.get_or_create_coordinator(
            "coordinator-2", NAMESPACE, CONFIG, False, chosen, False
        )
        contact = await cluster.call(actor, "contact")
        host, _, port = contact.address.tcp.rpartition(":")
        await cluster.kill(actor)
        assert host == "tcp://127.0.0.1"
        assert int(port) in range(21_600, 21_604)

    asyncio.run(scenario())


def test_a_recovered_coordinator_is_found_by_many_waiting_callers(cluster: RayCluster) -> None:
    """The coordinator's engines can find it while it waits for them, even with many pending
    calls."""

    async def scenario() -> None:
        endpoint = cluster.new_endpoint()
        actor = await cluster.get_or_create_coordinator(
            "coordinator-3", NAMESPACE, CONFIG, False, endpoint, True
        )
        waiting = [asyncio.ensure_future(cluster.call(actor, "view")) for _ in range(40)]
        contact = await asyncio.wait_for(cluster.call(actor, "contact"), HANG_S)
        assert await asyncio.wait_for(cluster.call(actor, "probe"), HANG_S)
        assert await asyncio.to_thread(find, contact, 20.0) == contact
        assert not any(call.done() for call in waiting), "it has recovered meanwhile"
        for call in waiting:
            call.cancel()
        await cluster.kill(actor)

    asyncio.run(scenario())


def test_waiting_calls_do_not_block_others(cluster: RayCluster) -> None:
    """The manager always has a pending call that waits for changes."""

    async def scenario() -> None:
        actor = await cluster.get_or_create_coordinator(
            "coordinator-4", NAMESPACE, CONFIG, False, cluster.new_endpoint(), False
        )
        epoch = (await cluster.call(actor, "view")).roster.epoch
        waiting = [
            asyncio.ensure_future(cluster.call(actor, "wait", epoch, 20.0)) for _ in range(8)
        ]
        await asyncio.wait_for(cluster.call(actor, "probe"), 10.0)
        assert (await cluster.call(actor, "membership")).view.roster.epoch == epoch
        assert not any(call.done() for call in waiting), "the call has waited for others"
        for call in waiting:
            call.cancel()
        await cluster.kill(actor)

    asyncio.run(scenario())


@pytest.mark.parametrize("actor", [Coordinator, EngineActor, WorkerActor])
def test_no_method_of_an_actor_is_a_coroutine(actor: Any) -> None:
    """With any coroutine method, Ray would run all calls of the actor on one event loop, one at a
    time."""
    kind = actor.__ray_metadata__.modified_class
    assert not has_async_methods(kind)
    assert has_async_methods(type("Async", (kind,), {"run": _coroutine}))


async def _coroutine(self: object) -> None: ...


def test_the_actor_has_each_method_that_its_handle_calls() -> None:
    source = inspect.getsource(coordinator_handle)
    called = set(re.findall(r'_send\("(\w+)"', source))
    assert len(called) > 8
    assert called <= set(dir(Coordinator.__ray_metadata__.modified_class))
