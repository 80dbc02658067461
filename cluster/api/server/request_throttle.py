"""Starts requests a few at a time, so that thousands that arrive at once do not delay all others.

The handler of a request runs without a pause from its first byte to its submission or refusal. The
event loop runs all ready tasks before it polls its sockets again. If 10 000 requests became ready
at once, a probe of `/health` and every token of every stream would wait for all of them. Therefore
each turn of the loop starts `PER_TURN` requests, in order of arrival. Short routes that must always
answer do not queue.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

from swell.cluster.api.request_context import route_path

PER_TURN = 2
"""Requests started per turn: some milliseconds of work if each submits a prompt of a few thousand
tokens."""
UNTHROTTLED_PATHS = ("/health", "/ping", "/ready", "/metrics", "/load", "/admin/")


class RequestThrottle:
    """ASGI middleware that queues requests. The limit of connections bounds the queue."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._left = PER_TURN
        """The number of requests that may still start in this turn of the loop."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not route_path(scope).startswith(UNTHROTTLED_PATHS):
            await self._acquire()
        await self._app(scope, receive, send)

    async def _acquire(self) -> None:
        loop = asyncio.get_running_loop()
        if self._left == PER_TURN:
            loop.call_soon(self._refill)
        if self._left:
            self._left -= 1
            return
        place = loop.create_future()
        self._waiting.append(place)
        await place

    def _refill(self) -> None:
        """Begins a new turn: waiting requests start before new ones."""
        self._left = PER_TURN
        while self._waiting and self._left:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                self._left -= 1
        if self._left < PER_TURN:
            asyncio.get_running_loop().call_soon(self._refill)
