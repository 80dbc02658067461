"""Time that counts as silence of a peer: seconds in which its messages were taken in. Pure.

A loop that was stopped, or held up by a long step, has not taken in what its peers sent meanwhile.
Measured by a wall clock all of them have been silent for that long, and a loop that goes by it
drops peers that are alive. So every loop that checks for silence measures by a `ListeningClock`
instead: it advances with each turn of the loop, by at most a quarter of the limit. A peer is found
silent only after the loop has listened more than four times and received nothing from it, however
late each of these turns was; and a peer that is dead is found, even if every turn is late.
"""

from __future__ import annotations

_TURNS_PER_LIMIT = 4


class ListeningClock:
    """Seconds of listening. `now` is a reading of any monotonic clock; the first call starts."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: the silence that is measured by this clock."""
        self._max_gap_s = limit_s / _TURNS_PER_LIMIT
        self._listened_s = 0.0
        self._last: float | None = None

    def advance(self, now: float) -> float:
        """The loop has taken in what was there; the time by this clock."""
        self._listened_s = listened_s = self.read(now)
        self._last = now
        return listened_s

    def read(self, now: float) -> float:
        """The time by this clock, between two calls of `advance` too."""
        if self._last is None:
            return self._listened_s
        gap_s = now - self._last
        if gap_s <= 0.0:
            return self._listened_s
        return self._listened_s + (gap_s if gap_s < self._max_gap_s else self._max_gap_s)
