"""How actors and placement groups that no manager knows are ended. No decisions."""

from __future__ import annotations

from swell.cluster.control.actor_names import find_strays
from swell.cluster.control.ray_port import Group, RayPort


async def end(ray: RayPort, name: str, namespace: str, group: Group | None) -> None:
    """End the actor of this name, if there is one, and this placement group."""
    actor = await ray.find_actor(name, namespace)
    if actor is not None:
        ray.kill(actor)
    if group is not None:
        ray.remove_group(group)


async def end_all(ray: RayPort, namespace: str) -> list[str]:
    """End everything of an application that has no manager any more. Returns the names."""
    actors, groups = await ray.actor_names(namespace), await ray.groups()
    names = find_strays(actors, groups, namespace)
    for name in names:
        await end(ray, name, namespace, groups.get(name))
    return names
