"""Requests begin a few at a time, so that thousands that come at once hold up no other request.

The handler of a request runs without a pause from its first byte to its submission, or to its
refusal. The event loop runs everything that is ready before it looks at its sockets again: were all
of 10 000 requests ready at once, a probe of `/health` and every token of every stream would wait
behind all of them. Here each turn of the loop begins `PER_TURN` of them, in the order in which they
came; what is short and must always answer does not queue.
"""

from __future__ import annotations

import asyncio
from collections import deque

from starlette.types import ASGIApp, Receive, Scope, Send

from swell.cluster.api.routing import route_path

PER_TURN = 2
"""Some milliseconds of work, were each of them to submit a prompt of a few thousand tokens."""
ARRIVAL_TIME_S = "swell.arrived_s"
"""Key of the ASGI scope: when the request came, on the clock of the event loop."""
UNTHROTTLED_PATHS = ("/health", "/ping", "/ready", "/metrics", "/load", "/admin/")


class RequestThrottle:
    """ASGI middleware. The limit of connections bounds the requests that wait."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._left = PER_TURN
        """How many may still begin in this turn of the loop."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope[ARRIVAL_TIME_S] = asyncio.get_running_loop().time()
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
        """Requests that wait start before new ones."""
        self._left = PER_TURN
        while self._waiting and self._left:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                self._left -= 1
        if self._left < PER_TURN:
            asyncio.get_running_loop().call_soon(self._refill)
