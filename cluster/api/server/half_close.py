"""Detects whether a client that has stopped sending waits for its answer or has left.

TCP sends the same segment (FIN) in both cases. RFC 9112 allows a client to stop sending and wait,
but nearly always the client has left, and its engines should serve others. A client that has left
answers any bytes that it receives with a reset. So the connection stays open, and bytes are written
to the client:

- A stream sends its next token. If none comes for `PROBE_S`, it sends a comment, which every
  event-stream reader skips.
- A client that waits that long for the first byte gets the interim response `100 Continue`, which
  every HTTP/1.1 client must skip (RFC 9110, 15.2).
- HTTP/1.0 does not have interim responses, and a client may leave after the probe: for these cases
  the kernel sends TCP keep-alive segments. The client's kernel answers them for an exited process
  until it forgets the connection, after a minute.

The event loop does not poll a socket that has nothing more to read, so this module polls it.
"""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable

from swell.cluster.api.server.response_framing import FramedResponse

PROBE_S = 1.0
"""The wait before the probe. Most answers begin sooner, so their clients see nothing unusual; a
longer wait would keep engines working for clients that have left."""
KEEPALIVE_S = 10
_MIN_POLL_S = 0.02
_MAX_POLL_S = 1.0
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b":\n\n"
_CHUNK = b"%x\r\n%b\r\n"
"""The framing of an HTTP chunk. The comment is sent between two events, each a whole chunk."""


class HalfCloseWatcher:
    """Probes one half-closed connection, and aborts it once its client has left. `response`
    returns the response to the request that the application handles."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        response: Callable[[], FramedResponse | None],
    ) -> None:
        self._loop = loop
        self._transport = transport
        self._response = response
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
            # A stream to HTTP/1.0 that has not begun can be probed later, once it has begun.
            self._probe_at_s = self._loop.time() + PROBE_S
            if said := _probe(self._response()):
                self._probe_at_s = float("inf")
                self._transport.write(said)
                self._pause_s = _MIN_POLL_S
        left_s = max(_MIN_POLL_S, self._probe_at_s - self._loop.time())
        self._timer = self._loop.call_later(min(self._pause_s, left_s), self._poll_socket)
        self._pause_s = min(2 * self._pause_s, _MAX_POLL_S)


def _probe(response: FramedResponse | None) -> bytes:
    """Returns bytes that mean nothing to the client and may be written now; empty: none exist."""
    if response is None:
        return b""
    if response.cycle.response_started:
        if not response.is_event_stream:
            return b""
        return _COMMENT if response.is_http10 else _CHUNK % (len(_COMMENT), _COMMENT)
    return b"" if response.is_http10 else _CONTINUE


def _keep_alive(connection: socket.socket) -> None:
    """Enables TCP keep-alive. Event loops do not expose a socket with `setsockopt`, but options set
    on a duplicate apply to the connection."""
    with connection.dup() as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            same.setsockopt(socket.IPPROTO_TCP, option, KEEPALIVE_S)
