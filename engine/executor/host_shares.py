"""How many workers share the cores and the memory of a host: those of all engines that have a part
there; and which stages do. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from swell.configs.schema import Config

_ENGINE = "-engine-"
"""In the name of every engine's placement group (`cluster/control/actor_names.py`)."""
_PLACED = "CREATED"
"""The state of a placement group whose resources are reserved."""


def bundle_workers(config: Config) -> int:
    """Workers of one bundle of an engine: tensor ranks of a stage, or all of a process."""
    parallel = config.parallel
    return parallel.world if parallel.executor == "inproc" else parallel.tensor


def workers_by_node(
    groups: Iterable[Mapping[str, Any]], config: Config, nodes: int
) -> Counter[str]:
    """Workers by node, for engines with this configuration.

    `groups`: Ray's table of placement groups; engines of every cluster of ours count. `nodes`: how
    many are alive. While engines start together, some may have no place yet: a node is counted with
    its part of `parallel.data` engines at least.
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
    """Bundles in the order in which pipeline stages take them: node by node."""
    first_seen: dict[str, int] = {}
    for bundle in sorted(bundle_nodes):
        first_seen.setdefault(bundle_nodes[bundle], bundle)
    return sorted(bundle_nodes, key=lambda bundle: (first_seen[bundle_nodes[bundle]], bundle))
