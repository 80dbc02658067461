"""An operator who requests changes from the manager, one after the other, and repeats requests that
got no answer."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from swell.cluster.control.plan.control_state import TAKEN_OVER, ScaleRefused
from swell.coordinator.manager_state import Sleep
from tests.simulator.actors import config_hash, with_weights
from tests.simulator.kernel.kernel import WORLD
from tests.simulator.scenario import Operation

if TYPE_CHECKING:
    from tests.simulator.control_plane import ControlPlane

_REPEAT_S = 0.5
_TIMEOUT_S = 15.0


class Operator:
    """Keeps the states of the cluster that are correct after the accepted and refused requests, and
    those that may have been accepted."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane, self._kernel = plane, plane.kernel
        self.wanted = {plane.scenario.engines}
        """The target numbers that are correct, unless the cluster is autoscaled."""
        self.paused: bool | None = False
        """Whether the engines must be paused; None: a request to pause or resume is in progress."""
        self.changed_at = 0.0
        """When a request was last started or answered."""
        self.num_begun = 0
        """Number of times that a manager started a request."""
        self.shrunk_at = float("-inf")
        """When the target number last fell, by an operator or the autoscaler."""
        self._waiting: deque[Operation] = deque()
        self._attempts = 0
        for operation in plane.scenario.operations:
            self._kernel.at(operation.at, WORLD, self._arm, operation)

    @property
    def possible_targets(self) -> set[int]:
        limits = self._plane.config.cluster
        if self._plane.scenario.autoscaled:
            return set(range(limits.min_engines, limits.max_engines + 1))
        return self.wanted

    @property
    def unanswered(self) -> list[Operation]:
        return list(self._waiting)

    def on_failed_change(self, target: int) -> None:
        """Adds the target to which the manager falls back after a requested change has failed."""
        self.wanted.add(target)

    def on_shrink(self) -> None:
        self.shrunk_at = self._kernel.now

    def _arm(self, operation: Operation) -> None:
        if operation.trigger is None:
            self._add(operation)
            return
        trigger = operation.trigger
        self._plane.net.aim(trigger.kind, trigger.count, lambda side: self._add(operation))

    def _add(self, operation: Operation) -> None:
        self._waiting.append(operation)
        if len(self._waiting) == 1:
            self._try()

    def _try(self) -> None:
        if not self._waiting:
            return
        operation, manager = self._waiting[0], self._plane.manager
        if operation.kind == "redeploy":
            self._plane.redeploy(operation.argument)
            self._on_answered()
            return
        self._attempts += 1
        attempt, again_s = self._attempts, _REPEAT_S
        if manager.process.alive and manager.has_started:
            again_s = _TIMEOUT_S
            manager.do(
                operation.kind,
                self._arguments(operation),
                lambda target: self._on_begun(operation, target),
                lambda result: self._on_end(operation, attempt, result),
            )
        self._kernel.at(self._kernel.now + again_s, WORLD, self._repeat, attempt)

    def _arguments(self, operation: Operation) -> tuple[Any, ...]:
        number = operation.argument
        match operation.kind:
            case "scale" | "drain":
                return (number,)
            case "upgrade" | "update_weights":
                return config_hash(number), with_weights(self._plane.config, number)
            case "pause" if number:
                return (Sleep(number),)
        return ()

    def _repeat(self, attempt: int) -> None:
        """Repeats a request that was not answered in time."""
        if attempt == self._attempts:
            self._try()

    def _on_begun(self, operation: Operation, target: int) -> None:
        self.num_begun += 1
        self.changed_at = self._kernel.now
        if target < max(self.wanted):
            self.on_shrink()
        self.wanted.add(target)
        if operation.kind in ("pause", "resume"):
            self.paused = None

    def _on_end(self, operation: Operation, attempt: int, result: Exception | int) -> None:
        """Handles the answer of a manager: the new target if it accepted the request, or an
        exception."""
        self._kernel.trace(f"operator {operation.kind} {result!r}".encode())
        self.changed_at = self._kernel.now
        if not self._waiting or operation is not self._waiting[0]:
            return  # an earlier attempt was answered, and the next request has started
        if isinstance(result, int):
            self.wanted = {result}
            if operation.kind in ("pause", "resume"):
                self.paused = operation.kind == "pause"
        elif not isinstance(result, ScaleRefused) or str(result) == TAKEN_OVER:
            if attempt == self._attempts:
                self._kernel.at(self._kernel.now + _REPEAT_S, WORLD, self._repeat, attempt)
            return
        if attempt == self._attempts:
            self._on_answered()

    def _on_answered(self) -> None:
        self.changed_at = self._kernel.now
        self._waiting.popleft()
        self._attempts += 1
        self._kernel.soon(WORLD, self._try)
