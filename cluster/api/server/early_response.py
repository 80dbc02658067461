"""An answer that begins before its request's body has come says that it ends the connection.

    head ──► answer begins: `connection: close` ──► answer ends ──► what still comes is thrown away

Without the header a client sends its next request into a connection that is being closed, and gets
no answer to it.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def close_after_early_response(cycle: RequestResponseCycle, app: Any) -> Any:
    """The application, whose early answers say so. `cycle.keep_alive` is false only while the head
    is written, or when the body has come after all: uvicorn would close at once, which takes the
    answer from a client that is still sending."""

    async def run(scope: Any, receive: Any, send: Any) -> None:
        keeps, early = cycle.keep_alive, False

        async def announce(message: Any) -> None:
            nonlocal early
            if message["type"] == "http.response.start":
                early = cycle.more_body
            if early:
                starts = message["type"] == "http.response.start"
                cycle.keep_alive = keeps and not starts and cycle.more_body
            await send(message)

        await app(scope, receive, announce)

    return run
