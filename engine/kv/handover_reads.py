"""Pauses reads of handover files after steps with such reads were lost: a file that cannot be read
costs the engine its whole cache, and other files may be damaged, too. Pure."""

from __future__ import annotations

from collections.abc import Callable

from swell.worker.wire import SchedulerOutput

Claim = Callable[[str], bool]
"""Claims all parts of a handover file for this engine; returns whether they exist."""

_PAUSE_S, _LONGEST_PAUSE_S = 60.0, 3600.0


def claim_nothing(name: str) -> bool:
    """Claims no file, for an engine to which no other one hands blocks over."""
    return False


class ReadsOfFiles:
    """The reads of handover files of one engine."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._in_flight: set[int] = set()
        """Steps that read handover files."""
        self._pause_s = _PAUSE_S
        self._not_before = float("-inf")

    def limit(self, claim: Claim) -> Claim:
        """Wraps `claim`, so that it claims no file during a pause."""
        return lambda name: self._clock() >= self._not_before and claim(name)

    def on_plan(self, plan: SchedulerOutput) -> None:
        """Records that the step is executed now."""
        if plan.imports:
            self._in_flight.add(plan.step)

    def on_result(self, plan: SchedulerOutput) -> None:
        if plan.imports:
            self._in_flight.discard(plan.step)
            self._pause_s = _PAUSE_S

    def on_loss(self) -> None:
        """Records the loss of the steps in flight, which a file may have caused, and starts a
        pause."""
        if self._in_flight:
            self._in_flight.clear()
            self._not_before = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
