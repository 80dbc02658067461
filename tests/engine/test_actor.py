"""The Ray actor of an engine, with Ray's tables stubbed: where it listens, and its share of the
host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray

from swell.cluster.control.actor_names import EngineName
from swell.configs.schema import load
from swell.coordinator.channel import make_keys
from swell.coordinator.contact import CoordinatorContact
from swell.coordinator.ground import ThreadGround
from swell.coordinator.wire import CoordinatorMessage
from swell.engine import actor
from tests.e2e.cluster import NANO

PORTS = range(21_800, 21_832)


def group(rank: int, node: str) -> dict[str, Any]:
    name = str(EngineName("swell-app", rank, "0" * 12, "1"))
    return {"name": name, "state": "CREATED", "bundles_to_node_id": {0: node}}


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An engine on node `a`, with two others there; its coordinator is silent."""
    groups = {str(rank): group(rank, node) for rank, node in enumerate("aaab")}
    monkeypatch.setattr(actor, "placement_group_table", lambda: groups)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": True}])
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.255.255.1")
    here = SimpleNamespace(get_node_id=lambda: "a")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: here)
    settings = {
        "model.device": "cpu",
        "cache.memory_bytes": 2_000_000,
        "cluster.interface": "lo",
        "cluster.ports": f"{PORTS[0]}-{PORTS[-1]}",
    }
    keys = make_keys()
    coordinator = ThreadGround().inbox(CoordinatorMessage, keys)
    kind = actor.EngineActor.__ray_metadata__.modified_class
    made = kind(load(str(NANO), settings), 0, CoordinatorContact(coordinator.address, keys, 1))
    yield made
    made.stop()
    coordinator.close()


def test_an_engine_listens_at_the_interface_and_has_its_part_of_the_host(shell: Any) -> None:
    ready = shell.start(None)
    host, _, port = ready.address.tcp.removeprefix("tcp://").partition(":")
    assert host == "127.0.0.1" and int(port) in PORTS[len(PORTS) // 4 :]
    assert shell._server.core.executor._worker.local_workers == 3
    assert ready.node == "a"
