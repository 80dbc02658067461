"""The phases of a start and how long each took. Pure."""

from __future__ import annotations

from collections.abc import Callable

import msgspec


class StartPhase(msgspec.Struct, frozen=True):
    """One finished phase of a start."""

    phase: str
    seconds: float


class StartTimeline:
    """Measures the phases of one start, which follow each other without gaps."""

    def __init__(self, phase: str, clock: Callable[[], float]) -> None:
        """`phase`: the first one, which begins now. `clock`: returns seconds."""
        self.text = phase
        """The current phase, with details that may change within it."""
        self._clock = clock
        self._phase, self._since = phase, clock()
        self._seconds: dict[str, float] = {}

    def enter(self, text: str) -> None:
        """Begins a phase if `text` names another one: the part before the first comma is its name,
        and the rest are details. A phase that occurs twice is one phase."""
        self.text = text
        phase = text.partition(",")[0]
        if phase != self._phase:
            self._close()
            self._phase = phase

    def finish(self) -> list[StartPhase]:
        """Ends the current phase. Returns all phases in the order of their beginning."""
        self._close()
        return [StartPhase(phase, seconds) for phase, seconds in self._seconds.items()]

    def _close(self) -> None:
        now = self._clock()
        self._seconds[self._phase] = self._seconds.get(self._phase, 0.0) + now - self._since
        self._since = now
