"""An HTTP response that is a stream of server-sent events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from swell.cluster.api.answers.disconnect import run_until_disconnect
from swell.cluster.api.answers.sse import EVENT_HEADERS


class EventStreamResponse(Response):
    """A response of encoded server-sent events, which stops when the client disconnects. `on_end`
    is called exactly once, after success, failure or disconnect. `has_failed` tells whether the
    last events reported an error."""

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
        self.status_code = 200
        self.init_headers({**EVENT_HEADERS, **headers})

    def add_end(self, callback: Callable[[], None]) -> None:
        """Registers `callback` to be called when the stream ends, after the callbacks registered
        before."""
        before = self._on_end

        def on_end() -> None:
            before()
            callback()

        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnect):
                await run_until_disconnect(receive, self._write(send))
        finally:
            self._on_end()

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[AsyncGenerator[bytes]]:
        """Yields the events to a reader inside this process instead of a client. Leaving the
        context closes them."""
        try:
            async with contextlib.aclosing(self._events) as events:
                yield events
        finally:
            self._on_end()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
