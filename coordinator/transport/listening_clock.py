"""A clock for the silence of peers: it counts only time in which messages were received. Pure.

A loop that was suspended, or blocked by a long step, has not received what its peers sent
meanwhile. By a wall clock all peers were silent for that long, and the loop would drop peers that
are alive. So every loop that checks for silence uses a `ListeningClock` instead: each turn of the
loop advances it by at most a quarter of the limit. A peer counts as silent only after the loop has
listened more than four times without a message from it, however late these turns were. A dead peer
is still detected, even if every turn is late.
"""

from __future__ import annotations

_TURNS_PER_LIMIT = 4


class ListeningClock:
    """Seconds of listening. `now` is a reading of any monotonic clock; the first call starts the
    clock."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: the silence that this clock measures."""
        self._max_gap_s = limit_s / _TURNS_PER_LIMIT
        self._listened_s = 0.0
        self._last: float | None = None

    def advance(self, now: float) -> float:
        """Advances the clock after the loop has handled all received messages. Returns its time."""
        self._listened_s = listened_s = self.read(now)
        self._last = now
        return listened_s

    def read(self, now: float) -> float:
        """Returns the clock's time, also between two calls of `advance`."""
        if self._last is None:
            return self._listened_s
        gap_s = now - self._last
        if gap_s <= 0.0:
            return self._listened_s
        return self._listened_s + (gap_s if gap_s < self._max_gap_s else self._max_gap_s)
