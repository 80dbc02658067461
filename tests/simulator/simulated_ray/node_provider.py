"""Simulates Ray's autoscaler and its cloud: hosts get resources while a placement group waits for
some, and lose them when none of these has been reserved for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulator.kernel.kernel import WORLD
from tests.simulator.scenario import HOSTS

if TYPE_CHECKING:
    from tests.simulator.control_plane import ControlPlane

_POLL_S = 0.5
BOOT_S = 4.0
"""The time from when a group waits until a host has resources for it."""
IDLE_S = 8.0


class NodeProvider:
    """Adds and removes the resources of all hosts except the first one, which is the head."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self.can_add = True
        self.added: list[str] = []
        self.given_back: list[str] = []
        self._waiting_since: float | None = None
        self._used_at: dict[str, float] = {}
        plane.kernel.at(_POLL_S, WORLD, self._poll)

    def _poll(self) -> None:
        plane, ray = self._plane, self._plane.ray
        now = plane.kernel.now
        plane.kernel.at(now + _POLL_S, WORLD, self._poll)
        if ray.away:
            return
        reserved = {host for group in ray.groups.values() for host in group.hosts}
        self._used_at |= dict.fromkeys(reserved, now)
        for host in HOSTS[1:]:
            if plane.resources[host] and now - self._used_at.get(host, now) > IDLE_S:
                self._set(host, {})
                self.given_back.append(host)
        if all(group.hosts for group in ray.groups.values()):
            self._waiting_since = None
        elif not self.can_add:
            return
        elif self._waiting_since is None:
            self._waiting_since = now
        elif now - self._waiting_since > BOOT_S:
            self._add_host(now)

    def _add_host(self, now: float) -> None:
        ray = self._plane.ray
        free = [h for h in HOSTS[1:] if h in ray.nodes and not self._plane.resources[h]]
        if free:
            self._waiting_since, self._used_at[free[0]] = None, now
            self.added.append(free[0])
            self._set(free[0], {"CPU": 2.0})

    def _set(self, host: str, resources: dict[str, float]) -> None:
        self._plane.resources[host] = resources
        if host in self._plane.ray.nodes:
            self._plane.ray.set_resources(host, resources)
