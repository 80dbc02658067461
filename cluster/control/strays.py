"""Actors and placement groups of a cluster as Ray lists them, and how to end them. No decisions.

Ray removes both asynchronously, and neither ends the other: an actor that dies leaves its placement
group behind, with all that it reserves. Actors in a placement group end with it, workers of a dead
engine too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group_table,
    remove_placement_group,
)

_REMOVED = "REMOVED"


def actor_names(namespace: str) -> set[str]:
    """Of every actor that is not dead: one that waits for resources, or is being restarted, too."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in found if actor["namespace"] == namespace}


def group_ids(name_filter: Callable[[str], bool]) -> dict[str, list[str]]:
    """Placement groups of such names, in every state but removed."""
    found: dict[str, list[str]] = {}
    for group_id, row in placement_group_table().items():
        if name_filter(row["name"]) and row["state"] != _REMOVED:
            found.setdefault(row["name"], []).append(group_id)
    return found


def group(group_id: str) -> PlacementGroup:
    return PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group_id)))


def find_actor(name: str, namespace: str) -> Any:
    """None: it has ended meanwhile."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(name, namespace=namespace)
    return None


def destroy(actor: Any, group: Any) -> None:
    """Kill the actor and give its resources back; each may be None."""
    if actor is not None:
        ray.kill(actor)
    if group is not None:
        remove_placement_group(group)


def end(name: str, namespace: str, group_ids: Iterable[str] = ()) -> None:
    """End the actor of this name, if there is one, and these placement groups."""
    destroy(find_actor(name, namespace), None)
    for group_id in group_ids:
        destroy(None, group(group_id))


def end_all(namespace: str, name_filter: Callable[[str], bool]) -> set[str]:
    """End every actor of the namespace and every such placement group. Returns their names."""
    actors, groups = actor_names(namespace), group_ids(name_filter)
    for name in actors | set(groups):
        end(name, namespace, groups.get(name, ()))
    return actors | set(groups)
