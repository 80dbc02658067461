"""A law about a growth that fails: the cluster returns to a size that it had, or to a smaller one
that was requested meanwhile, and never to one that it has not reached."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulator.actors import SimManager
from tests.simulator.control_plane import ControlPlane


class GrowthWatch:
    """Checks this law for each manager of a cluster that is not autoscaled."""

    def __init__(self, plane: ControlPlane, broken: Callable[[str], None]) -> None:
        self._break = broken
        self._sizes: dict[SimManager, set[int]] = {}
        """The targets of each manager since its cluster was complete, or since a request that
        followed a failed one."""
        self._failed: set[SimManager] = set()
        """The managers whose newest request has failed."""
        if not plane.scenario.autoscaled:
            plane.on_begin.append(self._on_begin)
            plane.on_reconcile.append(self._look_at)
            plane.on_failed_change.append(self._on_failed_change)

    def _look_at(self, manager: SimManager) -> None:
        """Records the target, and whether the cluster is complete."""
        fleet, target = manager.manager._fleet.view(), manager.manager.target
        sizes = self._sizes.setdefault(manager, {target})
        if len(fleet.staying) >= target:
            sizes.clear()
        sizes.add(target)

    def _on_begin(self, manager: SimManager, target: int) -> None:
        self._look_at(manager)
        sizes = self._sizes[manager]
        if manager in self._failed:
            self._failed.remove(manager)
            sizes.clear()
            sizes.add(manager.manager.target)
        sizes.add(target)

    def _on_failed_change(self, manager: SimManager, target: int) -> None:
        sizes = self._sizes.get(manager, {target})
        if target > max(min(sizes), manager.manager._fleet.view().num_present):
            self._break(f"a growth failed, and the target is {target}: not one of {sorted(sizes)}")
        self._failed.add(manager)
