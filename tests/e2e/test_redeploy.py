"""Deploys an application repeatedly in one Ray cluster, as `serve run` and `serve deploy` do."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ServeDeploySchema

from swell.cluster.app import Contact, application
from swell.cluster.control.upgrade_check import cluster_id_of
from swell.configs.schema import load
from swell.coordinator.transport.ports import free_port
from tests.e2e.cluster import NANO
from tests.faults.process import HTTP, alive, listeners
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

INGRESSES = 2
DEPLOYED: list[dict[str, Any]] = []
"""The applications in the file of `serve deploy`."""


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
    )
    serve.start(proxy_location="Disabled")
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def deploy(**overrides: Any) -> int:
    """Deploys the application; returns its port, which the configuration does not set."""
    settings = {
        "serve.port": 0,
        "serve.ingress_replicas": INGRESSES,
        "model.dtype": "float32",
        "cluster.drain_timeout_s": 1,
    }
    config = load(str(NANO), {**settings, **overrides})
    serve.run(application(config), name="again", route_prefix="/")
    manager = serve.get_deployment_handle("Manager", "again")

    def meet() -> Contact | None:
        found: Contact | None = manager.contact.remote(cluster_id_of(config)).result(
            timeout_s=HANG_S
        )
        return found

    return until(meet, "a manager of this configuration").port


def deploy_file(name: str, prefix: str, **more: Any) -> ApplicationStatus:
    """Deploys an application as `serve deploy` does with a file; returns its final status."""
    arguments = {"config": str(NANO), "cluster.drain_timeout_s": 1, **more}
    app = {
        "name": name,
        "import_path": "swell.cluster.app:build",
        "route_prefix": prefix,
        "args": arguments,
    }
    others = [app for app in DEPLOYED if app["name"] != name]
    DEPLOYED[:] = [*others, app]
    _get_global_client().deploy_apps(ServeDeploySchema(applications=DEPLOYED))

    def ended() -> ApplicationStatus | None:
        found = serve.status().applications[name].status
        return None if found == ApplicationStatus.DEPLOYING else found

    return until(ended, "deployed, or not")


def until(true: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + HANG_S
    while not (found := true()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return found


def get(port: int, path: str) -> dict[str, Any] | None:
    try:
        answer = HTTP.get(f"http://127.0.0.1:{port}{path}", timeout=HANG_S)
    except httpx.TransportError:
        return None
    return answer.json() if answer.status_code == 200 else None


def engine_pid(port: int) -> int:
    """Waits until the cluster serves with one engine; returns the pid of the engine."""

    def check() -> int | None:
        state = get(port, "/admin/cluster")
        serving = state is not None and get(port, "/ready") and state["state"] == "serving"
        return state["engines"][0]["pid"] if serving and len(state["engines"]) == 1 else None

    pid: int = until(check, "one engine that serves")
    return pid


def max_model_len(port: int) -> int | None:
    models = get(port, "/v1/models")
    return models and models["data"][0]["max_model_len"]


def sockets(port: int) -> dict[str, int]:
    """Returns inode of a socket that listens at this port -> the process that holds it."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    inodes = {row[9] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
    held: dict[str, int] = {}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
        except OSError:
            continue
        if found and found[1] in inodes:
            held[found[1]] = int(link.parts[2])
    return held


def test_a_redeployment_replaces_engines_and_keeps_the_port(own_ray: None) -> None:
    port = deploy()
    first = engine_pid(port)
    until(lambda: listeners(port) == INGRESSES, "every ingress listens at the one port")

    assert deploy(**{"serve.max_body_bytes": 1_000_000}) == port
    assert engine_pid(port) == first, "what engines do not see keeps them"

    assert deploy(**{"model.max_model_len": 512, "serve.max_body_bytes": 1_000_000}) == port
    until(lambda: not alive(first), "the engine of the old configuration ends")
    second = engine_pid(port)
    assert second != first
    until(lambda: max_model_len(port) == 512, "the new one answers")
    until(lambda: listeners(port) == INGRESSES, "old ingresses end")
    body = {"model": "nano", "prompt": [7] * 600, "max_tokens": 1}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=HANG_S)
    assert answer.status_code == 400 and "512" in answer.text

    before = sockets(port)
    victim = min(before.values())
    os.kill(victim, signal.SIGKILL)
    until(lambda: listeners(port) == INGRESSES and victim not in sockets(port).values(), "again")
    assert engine_pid(port) == second


def test_an_application_keeps_its_port_and_refuses_it_to_others(
    own_ray: None,
) -> None:
    port = free_port("127.0.0.1")
    assert deploy_file("file", "/file", **{"serve.port": port}) == ApplicationStatus.RUNNING
    settings = {"serve.port": port, "serve.max_body_bytes": 1_000_000}
    assert deploy_file("file", "/file", **settings) == ApplicationStatus.RUNNING
    assert deploy_file("other", "/other", **settings) == ApplicationStatus.DEPLOY_FAILED
    assert "in use" in serve.status().applications["other"].message
