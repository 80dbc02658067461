"""Answers that uvicorn alone would end or frame in the wrong way.

    head ──► answer begins: `connection: close` ──► answer ends ──► what still comes is thrown away

- An answer that begins before its request's body has come says that it ends the connection. Without
  the header a client sends its next request into a connection that is being closed, and gets no
  answer to it.
- Clients of HTTP/1.0 know neither chunks (RFC 9112, 6.1) nor interim answers (RFC 9110, 10.1.1).
  uvicorn sends both to all clients: here an answer whose length is not known ends with its
  connection, which is not kept for them in any case.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def is_http10(cycle: RequestResponseCycle) -> bool:
    return bool(cycle.scope["http_version"] == "1.0")


def with_framing(cycle: RequestResponseCycle, app: ASGIApp) -> Any:
    """`app` for this one request, whose answer is framed so.

    `cycle.keep_alive` is false only while an early head is written, or when the body has come after
    all: uvicorn would close at once, which takes the answer from a client that is still sending.
    uvicorn chunks what it has no length of, and holds the rest to its length: so for HTTP/1.0 it is
    given the length of each part as it comes.
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
