"""A client that has stopped sending: it waits for its answer, or it has left.

TCP has the same segment for both. RFC 9112 says that the first is allowed, and does not imply that
no answer is wanted; nearly always it is the second, whose engines are wanted elsewhere. The
difference is that a client that has left answers what is written to it with a reset. The connection
stays open, and the client is written to:

- A stream: by the next token. If none comes for `PROBE_S`, by a comment, which every reader of
  events skips.
- A client that waits that long for the first byte gets the interim response `100 Continue`, which
  every client of HTTP/1.1 must skip (RFC 9110, 15.2).
- HTTP/1.0 has none, and a client may leave later: the kernel probes with keep-alive segments. The
  other kernel answers for a process that is gone until it forgets the connection, after a minute.

The event loop does not look at a socket that has nothing more to read, so it is looked at here.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from swell.cluster.api.event_stream import IS_EVENT_STREAM
from swell.cluster.api.server.response_framing import is_http10

PROBE_S = 1.0
"""Most answers begin sooner, so that their clients see nothing else; longer would keep engines at
work for those who have left."""
KEEPALIVE_S = 10
_MIN_POLL_S = 0.02
_MAX_POLL_S = 1.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b":\n\n"
_CHUNK = b"%x\r\n%b\r\n"
"""Between two events, which are whole chunks."""


class HalfCloseWatcher:
    """Probes one such connection, and aborts it once its client has left. `answering`
    gives the request that the application has."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        answering: Callable[[], RequestResponseCycle | None],
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._answering = answering
        self._probe_at_s = loop.time() + PROBE_S
        self._pause_s = _MIN_POLL_S
        self._poll = select.poll()
        connection = transport.get_extra_info("socket")
        self._poll.register(connection.fileno(), 0)  # resets and errors are always reported
        _keep_alive(connection)
        self._timer = loop.call_later(self._pause_s, self._poll_socket)

    def stop(self) -> None:
        self._timer.cancel()

    def _poll_socket(self) -> None:
        if self._transport.is_closing():
            return
        if self._poll.poll(0):
            self._transport.abort()
            return
        if self._loop.time() >= self._probe_at_s:
            # A stream to HTTP/1.0 that has not begun can be probed once it has.
            self._probe_at_s = self._loop.time() + PROBE_S
            if said := _probe(self._answering()):
                self._probe_at_s = float("inf")
                self._transport.write(said)
                self._pause_s = _MIN_POLL_S
        left_s = max(_MIN_POLL_S, self._probe_at_s - self._loop.time())
        self._timer = self._loop.call_later(min(self._pause_s, left_s), self._poll_socket)
        self._pause_s = min(2 * self._pause_s, _MAX_POLL_S)


def _probe(answering: RequestResponseCycle | None) -> bytes:
    """Bytes that may be written now and have no meaning; empty: there are none."""
    if answering is None:
        return b""
    if answering.response_started:
        if IS_EVENT_STREAM not in answering.scope["state"]:
            return b""
        return _COMMENT if is_http10(answering) else _CHUNK % (len(_COMMENT), _COMMENT)
    return b"" if is_http10(answering) else _CONTINUE


def _keep_alive(connection: socket.socket) -> None:
    """Options set on a duplicate hold for the connection: event loops give no socket to set."""
    with connection.dup() as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            same.setsockopt(socket.IPPROTO_TCP, option, KEEPALIVE_S)
