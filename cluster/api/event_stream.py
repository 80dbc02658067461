"""An answer that is a stream of server-sent events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from swell.cluster.api.disconnect import run_until_disconnect

IS_EVENT_STREAM = "swell.events"
"""Key of the request's state: its answer is a stream of events, each in a chunk of its own."""
EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class EventStreamResponse:
    """A server-sent event stream over ready-made bytes; ends when the client leaves. `on_end` is
    called once, however it ends. `has_failed`: whether the last events were about an error."""

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        headers: Mapping[str, str],
        on_end: Callable[[], None],
        has_failed: Callable[[], bool] = lambda: False,
    ) -> None:
        self.has_failed = has_failed
        self._events = events
        self._on_end = on_end
        self.headers = MutableHeaders({**EVENT_HEADERS, **headers})

    def add_end(self, callback: Callable[[], None]) -> None:
        """Call this, too, when the stream ends, after what is called then already."""
        before = self._on_end

        def on_end() -> None:
            before()
            callback()

        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})[IS_EVENT_STREAM] = True
        try:
            with contextlib.suppress(ClientDisconnect):
                await run_until_disconnect(receive, self._write(send))
        finally:
            self._on_end()

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[AsyncGenerator[bytes]]:
        """The events, for a reader that is no client; they end with it."""
        try:
            async with contextlib.aclosing(self._events) as events:
                yield events
        finally:
            self._on_end()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.headers.raw})
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
