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
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

IS_EVENT_STREAM = "swell.events"
"""Key of the request's state. If set, the response is an event stream with one HTTP chunk for each
event."""


def is_http10(cycle: RequestResponseCycle) -> bool:
    return bool(cycle.scope["http_version"] == "1.0")


def with_framing(cycle: RequestResponseCycle, app: ASGIApp) -> Any:
    """Wraps `app` for this one request, so that its answer is framed correctly.

    `cycle.keep_alive` is false only while an early head is written, or once the body has arrived
    after all. Otherwise uvicorn would close the connection at once, and a client that is still
    sending would lose the answer. uvicorn chunks an answer without a length, and enforces a known
    length. So for HTTP/1.0 it is told the length of each part.
    """
    old = is_http10(cycle)
    if old:
        cycle.waiting_for_100_continue = False

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        keeps, early, unframed = cycle.keep_alive, False, False

        def send_framed(message: Message) -> Awaitable[None]:
            nonlocal early, unframed
            starts = message["type"] == "http.response.start"
            if starts:
                early = cycle.more_body
                unframed = old and not _has_length(message)
                if unframed:
                    cycle.chunked_encoding = False
            elif unframed and message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))
            if early:
                cycle.keep_alive = keeps and not starts and cycle.more_body
            return send(message)

        await app(scope, receive, send_framed)

    return run


def _has_length(message: Message) -> bool:
    return any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
