"""A law about requests of operators: one that is refused changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass
class _Requests:
    """The requests that a manager has got since it last had none that was unanswered."""

    before: dict[str, Any]
    """The state of the manager at the beginning of the first one."""
    num_unanswered: int = 0
    are_refused: bool = True
    """Whether all that were answered have been refused."""


class RefusalWatch:
    """Checks this law when a manager has answered all requests that overlap, and all of them have
    been refused."""

    def __init__(self, plane: ControlPlane, broken: Callable[[str], None]) -> None:
        self._plane, self._break = plane, broken
        self._requests: dict[SimManager, _Requests] = {}
        plane.on_request.append(self._on_request)
        plane.on_answer.append(self._on_answer)

    def _on_request(self, manager: SimManager, kind: str) -> None:
        if manager not in self._requests:
            self._requests[manager] = _Requests(_state_of(manager))
        self._requests[manager].num_unanswered += 1

    def _on_answer(self, manager: SimManager, kind: str, error: Exception | None) -> None:
        requests = self._requests[manager]
        is_refused = isinstance(error, ScaleRefused) and str(error) != TAKEN_OVER
        requests.are_refused = requests.are_refused and is_refused
        requests.num_unanswered -= 1
        if requests.num_unanswered:
            return
        del self._requests[manager]
        if requests.are_refused:
            self._compare(kind, requests.before, _state_of(manager))

    def _compare(self, kind: str, before: dict[str, Any], after: dict[str, Any]) -> None:
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
