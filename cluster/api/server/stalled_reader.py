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
from typing import NamedTuple

CHECKS = 4
"""The number of checks within the limit: a stalled client is cut off at most two checks late."""
_UNACKED, _BYTES_ACKED, _NOTSENT_BYTES = slice(24, 28), slice(120, 128), slice(144, 148)
"""Positions in `struct tcp_info` (linux/tcp.h): of `tcpi_unacked`, the packets that were sent and
not acknowledged; of `tcpi_bytes_acked`, a counter that only grows; and of `tcpi_notsent_bytes`."""


class StallClock:
    """Measures how long a counter has not changed. Pure."""

    def __init__(self, limit_s: float, now_s: float, count: int) -> None:
        self._limit_s = limit_s
        self._changed_s = now_s
        self._count = count

    def is_stalled(self, now_s: float, count: int, has_left: bool = True) -> bool:
        """Returns whether the count has stayed the same for at least `limit_s`, as far as was
        observed, while something was left to send."""
        if count != self._count or not has_left:
            self._count, self._changed_s = count, now_s
        return now_s - self._changed_s >= self._limit_s


class _Sent(NamedTuple):
    taken_bytes: int
    """The bytes that the client's kernel has acknowledged."""
    has_left: bool
    """Whether this host's kernel has bytes that were not acknowledged."""


class StalledReader:
    """Aborts a connection whose client reads nothing for `limit_s` while bytes are left to send:
    `has_left` says so of the connection's own buffer. A stream of small events may fit into the
    kernel's buffer for an hour, so the client is observed while the answer `goes_on`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        limit_s: float,
        has_left: Callable[[], bool],
        goes_on: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._limit_s = limit_s
        self._has_left, self._goes_on = has_left, goes_on
        self._clock = StallClock(limit_s, 0.0, 0)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Observes the client until it has taken the whole answer. The first check finds how many
        bytes it has taken until then."""
        if self._timer is None:
            self._clock = StallClock(self._limit_s, self._loop.time(), 0)
            self._arm()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._timer = self._loop.call_later(self._limit_s / CHECKS, self._check)

    def _check(self) -> None:
        self._timer = None
        is_buffered, sent = self._has_left(), self._sent()
        if not is_buffered and not self._goes_on():
            return
        has_left = is_buffered or sent.has_left
        if self._clock.is_stalled(self._loop.time(), sent.taken_bytes, has_left):
            self._transport.abort()
        else:
            self._arm()

    def _sent(self) -> _Sent:
        """Asks the kernel. The duplicate is needed because event loops do not expose a socket with
        `getsockopt`."""
        connection = self._transport.get_extra_info("socket")
        try:
            with connection.dup() as same:
                info = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _NOTSENT_BYTES.stop)
        except OSError:  # the connection has just ended
            return _Sent(0, has_left=False)
        unacked, taken, unsent = (
            int.from_bytes(info[part], sys.byteorder)
            for part in (_UNACKED, _BYTES_ACKED, _NOTSENT_BYTES)
        )
        return _Sent(taken, unacked > 0 or unsent > 0)
