"""A law about a growth that fails: the cluster returns to a size that it had, or to a smaller one
that was requested meanwhile, and never to one that it has not reached."""

from __future__ import annotations

from collections.abc import Callable

from tests.simulator.actors import SimManager
from tests.simulator.control_plane import ControlPlane


class GrowthWatch:
    """Checks this law for each manager. `look` must be called several times per virtual second."""

    def __init__(self, plane: ControlPlane, broken: Callable[[str], None]) -> None:
        self._plane, self._break = plane, broken
        self._sizes: dict[SimManager, set[int]] = {}
        """The targets of each manager since its cluster was complete."""
        plane.on_begin.append(self._on_begin)
        plane.on_failed_change.append(self._on_failed_change)

    def look(self) -> None:
        self._look_at(self._plane.manager)

    def _look_at(self, manager: SimManager) -> set[int]:
        fleet, target = manager.manager._fleet.view(), manager.manager.target
        sizes = self._sizes.setdefault(manager, {target})
        if len(fleet.staying) >= target:
            sizes.clear()
        sizes.add(target)
        return sizes

    def _on_begin(self, manager: SimManager, target: int) -> None:
        self._look_at(manager).add(target)

    def _on_failed_change(self, manager: SimManager, target: int) -> None:
        sizes, present = (
            self._sizes.get(manager, {target}),
            manager.manager._fleet.view().num_present,
        )
        if target > max(min(sizes), present):
            self._break(
                f"a growth failed, and the target is {target} again: not one of {sorted(sizes)}"
            )
        self._sizes[manager] = {target}
