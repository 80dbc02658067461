"""A client that takes no byte of what was written to it, as opposed to one that reads slowly.

An event loop learns that the kernel takes more only when a third of the socket's buffer is free:
over a megabyte, for which a slow client needs minutes. So progress is what the client's own kernel
has acknowledged, which it does until its buffers are full, too.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable

CHECKS = 4
"""Looks within the limit; a client is cut by one of them late at most."""
_BYTES_ACKED = slice(120, 128)
"""`tcpi_bytes_acked` in `struct tcp_info` (linux/tcp.h), which only ever grows."""


class StallClock:
    """How long a counter has not changed. Pure."""

    def __init__(self, limit_s: float, now_s: float, count: int) -> None:
        self._limit_s = limit_s
        self._changed_s = now_s
        self._count = count

    def is_stalled(self, now_s: float, count: int) -> bool:
        """Whether it has been `count` for `limit_s` and longer, as far as was looked."""
        if count != self._count:
            self._count, self._changed_s = count, now_s
        return now_s - self._changed_s >= self._limit_s


class StalledReader:
    """Aborts a connection whose client takes nothing for `limit_s`, while `has_left` says that
    something is left to send. Started again for each answer that does not leave at once."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        limit_s: float,
        has_left: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._limit_s = limit_s
        self._has_left = has_left
        self._clock = StallClock(limit_s, 0.0, 0)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._timer is None:
            self._clock = StallClock(self._limit_s, self._loop.time(), self._taken_bytes())
            self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._timer = self._loop.call_later(self._limit_s / CHECKS, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._has_left():
            return
        if self._clock.is_stalled(self._loop.time(), self._taken_bytes()):
            self._transport.abort()
        else:
            self._arm()

    def _taken_bytes(self) -> int:
        """Bytes that the client's kernel has taken. Event loops give no socket to ask."""
        connection = self._transport.get_extra_info("socket")
        try:
            with connection.dup() as same:
                info = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.stop)
        except OSError:  # the connection has just ended
            return 0
        return int.from_bytes(info[_BYTES_ACKED], sys.byteorder)
