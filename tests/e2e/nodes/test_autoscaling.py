"""Autoscaling with Ray's autoscaler: a burst of requests adds a node with an engine, a drain notice
moves that engine to another node before its node terminates, and without load all nodes are
released. No request fails and no answer changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import NANO, Cluster
from tests.e2e.nodes.autoscaled_ray import AutoscaledRay
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

NOTICE_S = 90
CLIENTS = 12
PROMPT = "count from 3 to 9"
SETTINGS = (
    "model.dtype=float32",
    "scheduler.max_rows=2",
    "cluster.cpus_per_worker=1",
    "cluster.max_engines=2",
    "cluster.stall_timeout_s=20",
    "cluster.drain_timeout_s=20",
    "autoscaling.enabled=true",
    "autoscaling.queue_s=0.1",
    "autoscaling.grow_after_s=3",
    "autoscaling.shrink_after_s=8",
)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[AutoscaledRay]:
    with AutoscaledRay() as running:
        yield running


class Load:
    """Runs clients that send one request after the other until `stop`."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self.answers: list[tuple[int, str]] = []
        """The status and text of each answer."""
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        body = {
            "model": "nano",
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 200,
            "ignore_eos": True,
            "temperature": 0,
        }
        with httpx.Client(timeout=None) as client:
            while not self._over.is_set():
                answer = client.post(f"{self._url}/v1/chat/completions", json=body)
                choice = answer.json().get("choices", [{"message": {"content": answer.text}}])[0]
                self.answers.append((answer.status_code, choice["message"]["content"]))

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(HANG_S)


def wait_for(
    cluster: Cluster, what: str, condition: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """Waits for `condition`; returns the first state of the cluster in which it holds."""
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        state: dict[str, Any] = cluster.get("/admin/cluster").json()
        if condition(state):
            return state
        time.sleep(0.1)
    raise AssertionError(f"{what}: {state}")


def active_nodes(state: dict[str, Any]) -> list[str]:
    return [engine["node"] for engine in state["engines"] if engine["state"] == "active"]


def test_nodes_and_engines_follow_the_load_and_a_notice(ray_cluster: AutoscaledRay) -> None:
    options = ("--address", ray_cluster.address)
    with Cluster(NANO, *SETTINGS, options=options) as cluster:
        assert ray_cluster.nodes() == []
        head = active_nodes(wait_for(cluster, "serves", lambda s: s["state"] == "serving"))[0]
        load = Load(cluster.url)
        try:
            with ray_cluster.adds_no_node():
                pending = wait_for(cluster, "waits for a node", lambda s: s["pending"] is not None)
            assert pending["rescale"]["phase"] == "pending"
            assert pending["pending"]["bundles"] == [{"CPU": 1.0}]
            assert "no room for" in pending["pending"]["reason"]
            assert pending["autoscaling"]["last_decision"]["engines"] == 2
            grown = wait_for(cluster, "grows", lambda s: len(active_nodes(s)) == 2)
            [first] = set(active_nodes(grown)) - {head}
            assert ray_cluster.nodes() == [first]

            ray_cluster.drain(first, NOTICE_S)
            wait_for(cluster, "follows the notice", lambda s: s["draining_nodes"] != [])
            moved = wait_for(
                cluster,
                "moves",
                lambda s: (
                    len(active_nodes(s)) == 2
                    and first not in [engine["node"] for engine in s["engines"]]
                ),
            )
            assert len(set(active_nodes(moved))) == 2
        finally:
            load.stop()
        quiet = wait_for(cluster, "shrinks", lambda s: len(s["engines"]) == 1)
        assert quiet["target"] == 1
        deadline = time.monotonic() + HANG_S
        while (nodes := ray_cluster.nodes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert nodes == [], "a node is not given back"
        metrics = cluster.get("/metrics").text
        assert 'swell_autoscaler_decisions_total{direction="shrink"} 1.0' in metrics
        assert "swell_engines_target 1.0" in metrics
    assert len(load.answers) > CLIENTS
    assert {status for status, _ in load.answers} == {200}
    assert len({text for _, text in load.answers}) == 1, "all have the same prompt"
