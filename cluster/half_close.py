"""A client that has stopped sending: it waits for its answer, or it has left.

TCP tells both by the same segment. HTTP says that the first is allowed and that no answer may be
withheld for it (RFC 9112, 9.6 and 8), and nearly always it is the second, whose engines are wanted
elsewhere. What tells them apart is that whoever has left answers what is written to it with a
reset. So the connection stays open, and the client is written to:

- A stream is. The first token after the end tells.
- Who still waits for the first byte after `PROBE_S` gets the interim answer `100 Continue`, which
  every client of HTTP/1.1 must skip (RFC 9110, 15.2).
- HTTP/1.0 has none, and a client may leave later: the kernel asks with keep-alive segments. The
  other kernel answers for a process that is gone until it forgets the connection, after a minute.

The event loop does not look at a socket that has nothing more to read, so it is looked at here.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable

PROBE_S = 1.0
"""Most answers begin sooner, so that their clients see nothing else; longer would keep engines at
work for those who have left."""
KEEPALIVE_S = 10
_FIRST_LOOK_S = 0.02
_LONGEST_PAUSE_S = 1.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HalfClosed:
    """Looks after one such connection, and aborts it once its client has left. `may_probe` says
    whether an interim answer may be written now."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        may_probe: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._may_probe = may_probe
        self._probe_at_s = loop.time() + PROBE_S
        self._pause_s = _FIRST_LOOK_S
        self._poll = select.poll()
        connection = transport.get_extra_info("socket")
        self._poll.register(connection.fileno(), 0)  # a reset and its like are always told
        _keep_alive(connection)
        self._timer = loop.call_later(self._pause_s, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        if self._poll.poll(0):
            self._transport.abort()
            return
        if self._loop.time() >= self._probe_at_s:
            self._probe_at_s = float("inf")
            if self._may_probe():
                self._transport.write(_CONTINUE)
                self._pause_s = _FIRST_LOOK_S
        left_s = max(_FIRST_LOOK_S, self._probe_at_s - self._loop.time())
        self._timer = self._loop.call_later(min(self._pause_s, left_s), self._look)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


def _keep_alive(connection: socket.socket) -> None:
    """The options are the connection's, whoever sets them: event loops lend no socket of theirs."""
    with connection.dup() as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            same.setsockopt(socket.IPPROTO_TCP, option, KEEPALIVE_S)
