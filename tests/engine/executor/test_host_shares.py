"""The engines of a host share its cores and memory; engines of other hosts do not count."""

from __future__ import annotations

from typing import Any

import pytest

from swell.cluster.control.engines.actor_names import EngineName
from swell.configs.schema import load
from swell.engine.executor.host_shares import workers_by_node

NAME = str(EngineName("swell-swell", 0, "0123456789ab", "7c01d2e4"))


def group(*nodes: str, name: str = NAME, state: str = "CREATED") -> Any:
    return {"name": name, "state": state, "bundles_to_node_id": dict(enumerate(nodes))}


@pytest.mark.parametrize(
    ("parallel", "groups", "nodes", "shares"),
    [
        ({"data": 2}, [group("a"), group("b")], 2, {"a": 1, "b": 1}),
        ({"data": 4}, [group("a"), group("a"), group("a"), group("b")], 2, {"a": 3, "b": 2}),
        ({"pipeline": 2, "data": 2}, [group("a", "b"), group("a", "b")], 2, {"a": 2, "b": 2}),
        ({"tensor": 2}, [group("a"), group("a")], 3, {"a": 4}),
        ({"tensor": 2, "pipeline": 2, "executor": "inproc"}, [group("a")], 2, {"a": 4}),
        # Only the first of four engines that start together has its placement group.
        ({"data": 4}, [group("a"), group("a", state="PENDING")], 1, {"a": 4}),
        # Engines were added after the start.
        ({"data": 1}, [group("a"), group("a"), group("b")], 2, {"a": 2, "b": 1}),
        ({}, [group("a"), group("a", state="REMOVED"), group("a", name="another")], 1, {"a": 1}),
    ],
)
def test_workers_on_one_host_share_its_cores_and_memory(parallel, groups, nodes, shares) -> None:
    config = load({"model": {"path": "m"}, "parallel": parallel})
    assert workers_by_node(groups, config, nodes) == shares
