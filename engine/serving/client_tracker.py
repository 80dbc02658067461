"""Tracks the ingresses of an engine: which are alive, and the message counts of each connection."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swell.coordinator.transport.listening_clock import ListeningClock
from swell.engine.wire import KeepAlive, KeepAliveReply


@dataclass(slots=True)
class _Client:
    """One connection of an ingress."""

    heard_at: float
    received: int = 0
    """Number of received messages, without keep-alives."""
    last_seq: int = 0
    """Number of the last message with outputs."""


class ClientTracker:
    """Tracks connections by their channel identities. Pure: the time is an argument.

    Silence is time in which the engine listened and received nothing. A long step or a repair,
    during which no message can be received, does not count
    (`coordinator/transport/listening_clock.py`)."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._clock = ListeningClock(silence_s)
        self._clients: dict[bytes, _Client] = {}
        self._replaced: dict[bytes, float] = {}
        """Replaced connection -> when its ingress gave it up: its late messages arrive within a
        moment, or never."""
        self._now = 0.0

    def on_message(self, client: bytes, now: float) -> None:
        """Records a message that the ingress counts."""
        self._on_message(client, now).received += 1

    def on_keep_alive(
        self, client: bytes, message: KeepAlive, now: float, waits_for_coordinator: bool = False
    ) -> KeepAliveReply:
        """Returns the reply: the counts of sent and received messages differ if some were lost."""
        known = self._on_message(client, now)
        return KeepAliveReply(message.sent, known.received, known.last_seq, waits_for_coordinator)

    def advance(self, now: float) -> None:
        """Advances the clock after all received messages were handled."""
        self._now = self._clock.advance(now)

    def next_seq(self, client: bytes) -> int:
        """Returns the number of the next message to a client, from 1: a gap reveals a loss."""
        known = self._clients.get(client)
        if known is None:
            known = self._clients[client] = _Client(self._now)
        known.last_seq += 1
        return known.last_seq

    def replace(self, clients: Iterable[bytes], now: float) -> None:
        """Forgets these connections, and ignores their late messages."""
        for client in clients:
            self._clients.pop(client, None)
            self._replaced[client] = self._clock.read(now)

    def is_replaced(self, client: bytes) -> bool:
        return client in self._replaced

    def drop_silent(self) -> list[bytes]:
        """Forgets clients that count as dead, and returns them."""
        limit = self._now - self._silence_s
        self._replaced = {client: at for client, at in self._replaced.items() if at >= limit}
        silent = [client for client, known in self._clients.items() if known.heard_at < limit]
        for client in silent:
            del self._clients[client]
        return silent

    def forget(self, client: bytes) -> None:
        """Forgets a client after its last message was sent."""
        self._clients.pop(client, None)

    def _on_message(self, client: bytes, now: float) -> _Client:
        known = self._clients.setdefault(client, _Client(0.0))
        known.heard_at = self._clock.read(now)
        return known
