"""A law about requests of operators: one that is refused changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from swell.cluster.control.plan.control_state import TAKEN_OVER, ChangeStage, ScaleRefused
from swell.cluster.control.plan.versions import UpgradeStage
from tests.simulator.actors import SimManager
from tests.simulator.control_plane import ControlPlane

_REQUESTED = ("target", "pause", "sleep", "wanted", "versions")
"""The fields of a manager's state that requests of operators change."""
_GIVES_UP: dict[str, Callable[[dict[str, Any]], bool]] = {
    "target": lambda state: state["change"] is ChangeStage.FAILED,
    "wanted": lambda state: state["upgrade"] in (UpgradeStage.ROLLING_BACK, UpgradeStage.FAILED),
}
"""Fields that a manager also changes itself when engines do not start: whether it may have done
so."""


class RefusalWatch:
    """Checks this law when a manager answers. Requests that overlap are not compared."""

    def __init__(self, plane: ControlPlane, broken: Callable[[str], None]) -> None:
        self._plane, self._break = plane, broken
        self._before: dict[SimManager, list[dict[str, Any] | None]] = {}
        """The state of each manager at the beginning of each unanswered request; None: it overlaps
        with another one."""
        plane.on_request.append(self._on_request)
        plane.on_answer.append(self._on_answer)

    def _on_request(self, manager: SimManager, kind: str) -> None:
        running = self._before.setdefault(manager, [])
        running.append(_state_of(manager))
        if len(running) > 1:
            running[:] = [None] * len(running)

    def _on_answer(self, manager: SimManager, kind: str, error: Exception | None) -> None:
        before = self._before[manager].pop()
        is_refused = isinstance(error, ScaleRefused) and str(error) != TAKEN_OVER
        if before is None or not is_refused:
            return
        after = _state_of(manager)
        for name in _REQUESTED:
            if name == "target" and self._plane.scenario.autoscaled:
                continue
            may_change = name in _GIVES_UP and _GIVES_UP[name](after)
            if before[name] != after[name] and not may_change:
                self._break(f"a {kind} was refused, and has changed the {name} of the manager")


def _state_of(manager: SimManager) -> dict[str, Any]:
    state, record = manager.manager._state, manager.manager.upgrader.record
    return {
        "target": state.change.target,
        "change": state.change.stage,
        "pause": state.pause_requested,
        "sleep": state.sleep,
        "wanted": record.wanted,
        "versions": [version.name for version in record.versions],
        "upgrade": record.stage,
    }
