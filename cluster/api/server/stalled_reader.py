"""Detects a client that does not read its answer at all, as opposed to one that reads slowly.

An event loop learns that the kernel accepts more bytes only when a third of the socket's buffer is
free: over a megabyte, for which a slow client needs minutes. So progress is measured by the bytes
that the client's kernel has acknowledged, which it does until its own buffers are full.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable

CHECKS = 4
"""The number of checks within the limit: a stalled client is cut off at most one check too late."""
_BYTES_ACKED = slice(120, 128)
"""The position of `tcpi_bytes_acked`, a counter that only grows, in `struct tcp_info`
(linux/tcp.h)."""


class StallClock:
    """Measures how long a counter has not changed. Pure."""

    def __init__(self, limit_s: float, now_s: float, count: int) -> None:
        self._limit_s = limit_s
        self._changed_s = now_s
        self._count = count

    def is_stalled(self, now_s: float, count: int) -> bool:
        """Returns whether the count has stayed the same for at least `limit_s`, as far as was
        observed."""
        if count != self._count:
            self._count, self._changed_s = count, now_s
        return now_s - self._changed_s >= self._limit_s


class StalledReader:
    """Aborts a connection whose client reads nothing for `limit_s` while `has_left` says that bytes
    are left to send. It is started for each answer that is not sent at once."""

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
        """Returns the bytes that the client's kernel has acknowledged. The duplicate is needed
        because event loops do not expose a socket with `getsockopt`."""
        connection = self._transport.get_extra_info("socket")
        try:
            with connection.dup() as same:
                info = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED.stop)
        except OSError:  # the connection has just ended
            return 0
        return int.from_bytes(info[_BYTES_ACKED], sys.byteorder)
