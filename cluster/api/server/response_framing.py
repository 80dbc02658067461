"""Corrects the framing and the end of answers that uvicorn by itself would get wrong.

    head ──► answer begins: `connection: close` ──► answer ends ──► later bytes are dropped

- An answer that begins before the body of its request has arrived announces `connection: close`.
  Without the header a client would send its next request into a connection that is being closed,
  and get no answer.
- HTTP/1.0 clients support neither chunks (RFC 9112, 6.1) nor interim answers (RFC 9110, 10.1.1),
  but uvicorn sends both to all clients. Here an answer of unknown length ends with its connection,
  which is never kept open for these clients.
"""

from __future__ import annotations

from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

EVENT_STREAM = b"text/event-stream"


class FramedResponse:
    """The response to one request: an ASGI application around `app` that corrects its framing.

    `cycle.keep_alive` is false only while an early head is written, or once the body has arrived
    after all. Otherwise uvicorn would close the connection at once, and a client that is still
    sending would lose the answer. uvicorn chunks an answer without a length, and enforces a known
    length. So for HTTP/1.0 it is told the length of each part.
    """

    def __init__(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:
        self.cycle = cycle
        self.is_http10 = cycle.scope["http_version"] == "1.0"
        self.is_event_stream = False
        """Whether the head announced an event stream, which has one HTTP chunk for each event."""
        self._app = app
        self._early = False
        """Whether the head was sent before the body of the request had arrived."""
        self._unframed = False
        """Whether only the end of the connection ends the body."""
        if self.is_http10:
            cycle.waiting_for_100_continue = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle, keeps = self.cycle, self.cycle.keep_alive

        def send_framed(message: Message) -> Awaitable[None]:
            starts = message["type"] == "http.response.start"
            if starts:
                self._read_head(message)
            elif self._unframed and message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))
            if self._early:
                cycle.keep_alive = keeps and not starts and cycle.more_body
            return send(message)

        await self._app(scope, receive, send_framed)

    def _read_head(self, message: Message) -> None:
        headers = {name.lower(): value for name, value in message.get("headers", ())}
        self._early = self.cycle.more_body
        self.is_event_stream = headers.get(b"content-type", b"").startswith(EVENT_STREAM)
        self._unframed = self.is_http10 and b"content-length" not in headers
        if self._unframed:
            self.cycle.chunked_encoding = False
