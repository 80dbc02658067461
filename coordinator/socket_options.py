"""How soon the ends of a channel notice that a link has failed, and that it is back."""

from __future__ import annotations

from typing import Any

from swell.coordinator.handshakes import HANDSHAKE_S

CONNECT_S = 2.0
"""How long the first packet of a connection may remain unanswered, with one repetition by TCP."""


def detect_silence(socket: Any, silence_s: float) -> None:
    """Let a connection end at both of its sides if nothing has come through it for `silence_s`,
    though ZeroMQ's own threads, which also run during a long step, send heartbeats through it. It
    is then opened again; what was under way is lost."""
    silence_ms = round(silence_s * 1000)
    socket.heartbeat_ivl = silence_ms // 4
    socket.heartbeat_timeout = socket.tcp_maxrt = silence_ms - silence_ms // 4


def connect_soon(socket: Any) -> None:
    """Let an attempt to connect end without an answer, and begin a new one.

    TCP repeats the first packet after 1, 3, 7, 15, 31 and 63 s: without this a link that is back
    remains unused for up to as long as it was cut.
    """
    socket.connect_timeout = round(CONNECT_S * 1000)
    socket.handshake_ivl = round(HANDSHAKE_S * 1000)
