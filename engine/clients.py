"""The ingresses that an engine works for: who still waits, and how much each was told."""

from __future__ import annotations

from swell.coordinator.listening import ListeningClock


class Clients:
    """Keyed by the channel's identity. Pure, with time as an argument.

    Silence is time in which the engine listened and heard nothing: a long step or a repair, during
    which nothing can be taken in, is none (`coordinator/listening.py`).
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._clock = ListeningClock(silence_s)
        self._heard_at: dict[bytes, float] = {}
        self._told: dict[bytes, int] = {}
        self._now = 0.0

    def heard(self, client: bytes, now: float) -> None:
        self._heard_at[client] = self._clock.read(now)

    def listened(self, now: float) -> None:
        """Everything that was there has been taken in."""
        self._now = self._clock.listened(now)

    def next_seq(self, client: bytes) -> int:
        """The number of the next message to a client, from 1: a gap tells it of a loss."""
        self._told[client] = self._told.get(client, 0) + 1
        return self._told[client]

    def drop_silent(self) -> list[bytes]:
        """Clients that are taken for dead, and are forgotten."""
        silent = [c for c, at in self._heard_at.items() if self._now - at > self._silence_s]
        for client in silent:
            del self._heard_at[client]
            self._told.pop(client, None)
        return silent
