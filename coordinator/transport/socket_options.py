"""Socket options that determine how soon a channel detects a broken link and reconnects."""

from __future__ import annotations

from typing import Any

from swell.coordinator.transport.handshakes import HANDSHAKE_S

CONNECT_S = 2.0
"""Timeout for the first packet of a connection, which TCP repeats once in this time."""


def detect_silence(socket: Any, silence_s: float) -> None:
    """Closes a connection at both sides if nothing has arrived for `silence_s`, although ZeroMQ's
    own threads, which also run during a long step, send heartbeats. ZeroMQ then reconnects;
    messages in transit are lost."""
    silence_ms = round(silence_s * 1000)
    socket.heartbeat_ivl = silence_ms // 4
    socket.heartbeat_timeout = socket.tcp_maxrt = silence_ms - silence_ms // 4


def connect_soon(socket: Any) -> None:
    """Sets timeouts for connection attempts, after which ZeroMQ retries.

    TCP repeats the first packet after 1, 3, 7, 15, 31 and 63 s: without a timeout, a restored link
    could stay unused for as long as it was down.
    """
    socket.connect_timeout = round(CONNECT_S * 1000)
    socket.handshake_ivl = round(HANDSHAKE_S * 1000)
