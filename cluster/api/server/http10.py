"""Answers to clients of HTTP/1.0, which know neither chunks (RFC 9112, 6.1) nor interim answers
(RFC 9110, 10.1.1). uvicorn sends both to everybody: here an answer whose length is not known ends
with its connection, which is not kept for them in any case."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def is_http10(cycle: RequestResponseCycle) -> bool:
    return bool(cycle.scope["http_version"] == "1.0")


def without_chunks(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """`app` for this one request of such a client. uvicorn chunks what it has no length of, and
    holds the rest to its length: so it is given the length of each part as it comes."""
    cycle.waiting_for_100_continue = False

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_open = False

        async def send_plain(message: Message) -> None:
            nonlocal is_open
            if message["type"] == "http.response.start":
                is_open = not _has_length(message)
                if is_open:
                    cycle.chunked_encoding = False
            elif is_open and message["type"] == "http.response.body":
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer


def _has_length(message: Any) -> bool:
    return any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
