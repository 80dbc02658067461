"""The ingresses that an engine works for: which still wait, and what was exchanged with each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swell.coordinator.listening_clock import ListeningClock
from swell.engine.wire import KeepAlive, KeepAliveReply


@dataclass(slots=True)
class _Client:
    """One connection of an ingress."""

    heard_at: float
    received: int = 0
    """Messages that came, keep-alives not counted."""
    last_seq: int = 0
    """Number of the last message with outputs."""


class ClientTracker:
    """Keyed by the channel's identity of a connection. Pure, with time as an argument.

    Silence is time in which the engine listened and received nothing: a long step or a repair,
    during which no message can be taken in, is none (`coordinator/listening_clock.py`).
    """

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._clock = ListeningClock(silence_s)
        self._clients: dict[bytes, _Client] = {}
        self._replaced: dict[bytes, float] = {}
        """Connections that their ingress has given up, and when: what was still under way comes
        within a moment, or never."""
        self._now = 0.0

    def on_message(self, client: bytes, now: float) -> None:
        """A message that counts."""
        self._on_message(client, now).received += 1

    def on_keep_alive(
        self, client: bytes, message: KeepAlive, now: float, waits_for_coordinator: bool = False
    ) -> KeepAliveReply:
        """The answer: what the ingress has sent and what has come differ if something was lost."""
        known = self._on_message(client, now)
        return KeepAliveReply(message.sent, known.received, known.last_seq, waits_for_coordinator)

    def advance(self, now: float) -> None:
        """Every message that was there has been taken in."""
        self._now = self._clock.advance(now)

    def next_seq(self, client: bytes) -> int:
        """The number of the next message to a client, from 1: a gap reveals a loss."""
        known = self._clients.get(client)
        if known is None:
            known = self._clients[client] = _Client(self._now)
        known.last_seq += 1
        return known.last_seq

    def replace(self, clients: Iterable[bytes], now: float) -> None:
        """Forget these, and what may still come from them."""
        for client in clients:
            self._clients.pop(client, None)
            self._replaced[client] = self._clock.read(now)

    def is_replaced(self, client: bytes) -> bool:
        return client in self._replaced

    def drop_silent(self) -> list[bytes]:
        """Forget clients that are taken for dead, and return them."""
        limit = self._now - self._silence_s
        self._replaced = {client: at for client, at in self._replaced.items() if at >= limit}
        silent = [client for client, known in self._clients.items() if known.heard_at < limit]
        for client in silent:
            del self._clients[client]
        return silent

    def forget(self, client: bytes) -> None:
        """Its last message was sent."""
        self._clients.pop(client, None)

    def _on_message(self, client: bytes, now: float) -> _Client:
        known = self._clients.setdefault(client, _Client(0.0))
        known.heard_at = self._clock.read(now)
        return known
