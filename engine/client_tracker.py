"""The ingresses that an engine works for: which still wait, and how much each was sent."""

from __future__ import annotations

from swell.coordinator.listening_clock import ListeningClock


class ClientTracker:
    """Keyed by the channel's identity. Pure, with time as an argument.

    Silence is time in which the engine listened and received nothing: a long step or a repair,
    during which no message can be taken in, is none (`coordinator/listening_clock.py`).
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._clock = ListeningClock(silence_s)
        self._heard_at: dict[bytes, float] = {}
        self._last_seq: dict[bytes, int] = {}
        self._now = 0.0

    def on_message(self, client: bytes, now: float) -> None:
        self._heard_at[client] = self._clock.read(now)

    def advance(self, now: float) -> None:
        """Every message that was there has been taken in."""
        self._now = self._clock.advance(now)

    def next_seq(self, client: bytes) -> int:
        """The number of the next message to a client, from 1: a gap reveals a loss."""
        self._last_seq[client] = self._last_seq.get(client, 0) + 1
        return self._last_seq[client]

    def drop_silent(self) -> list[bytes]:
        """Forget clients that are taken for dead, and return them."""
        silent = [c for c, at in self._heard_at.items() if self._now - at > self._silence_s]
        for client in silent:
            del self._heard_at[client]
            self._last_seq.pop(client, None)
        return silent
