"""Calculates how many workers of all engines share the cores and the memory of a host, and the
order of pipeline stages over hosts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from swell.configs.schema import Config

_ENGINE = "-engine-"
"""Part of the name of every engine's placement group (`cluster/control/engines/actor_names.py`)."""
_PLACED = "CREATED"
"""The state of a placement group whose resources are reserved."""


def bundle_workers(config: Config) -> int:
    """Returns the number of workers in one bundle of an engine: the tensor ranks of a stage, or all
    workers of a process."""
    parallel = config.parallel
    return parallel.world if parallel.executor == "inproc" else parallel.tensor


def workers_by_node(
    groups: Iterable[Mapping[str, Any]], config: Config, nodes: int
) -> Counter[str]:
    """Returns the number of workers by node, for engines with this configuration.

    `groups`: Ray's table of placement groups; engines of every Swell cluster count. `nodes`: number
    of live nodes. While engines start together, some may not be placed yet: each node counts at
    least its share of `parallel.data` engines.
    """
    placed = Counter(
        node
        for group in groups
        if group["state"] == _PLACED and _ENGINE in group["name"]
        for node in group["bundles_to_node_id"].values()
    )
    at_least = -(-config.parallel.world * config.parallel.data // max(1, nodes))
    workers = bundle_workers(config)
    return Counter({node: max(at_least, count * workers) for node, count in placed.items()})


def stage_order(bundle_nodes: dict[int, str]) -> Sequence[int]:
    """Returns the bundles in the order in which pipeline stages use them: node by node."""
    first_seen: dict[str, int] = {}
    for bundle in sorted(bundle_nodes):
        first_seen.setdefault(bundle_nodes[bundle], bundle)
    return sorted(bundle_nodes, key=lambda bundle: (first_seen[bundle_nodes[bundle]], bundle))
