"""The ingresses that an engine works for: who still waits, and how much each was told."""

from __future__ import annotations


class Clients:
    """Keyed by the channel's identity. Pure, with time as an argument."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._heard_at: dict[bytes, float] = {}
        self._told: dict[bytes, int] = {}

    def heard(self, client: bytes, now: float) -> None:
        self._heard_at[client] = now

    def next_seq(self, client: bytes) -> int:
        """The number of the next message to a client, from 1: a gap tells it of a loss."""
        self._told[client] = self._told.get(client, 0) + 1
        return self._told[client]

    def drop_silent(self, now: float) -> list[bytes]:
        """Clients that are taken for dead, and are forgotten."""
        silent = [c for c, at in self._heard_at.items() if now - at > self._silence_s]
        for client in silent:
            del self._heard_at[client]
            self._told.pop(client, None)
        return silent
