"""Bytes that are sent while a request waits, so that no proxy closes its connection as idle.

    body read ── keep_alive_s ──► head, filler ── keep_alive_s ──► filler ... ──► answer

A proxy measures the time since the last byte of an answer; TCP keep-alive probes do not count. A
stream may wait for an engine, for a slot, or for the replacement of its engine: its head and then
comments are sent meanwhile. A whole answer can only be preceded by white space, under a status that
is sent before the result is known. Therefore only a client that asks for it (`EARLY_HEAD`) gets
that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.types import Message, Send

from swell.cluster.api.answers.sse import EVENT_HEADERS
from swell.cluster.text.errors import BadRequest
from swell.configs.error_text import shown

EARLY_HEAD = "x-swell-early-head"
"""The header with which a client asks for an early head of an answer that is not streamed."""
BLANK = b" "
"""JSON may begin with white space (RFC 8259, 2)."""
_WHOLE_HEADERS = {
    "content-type": "application/json",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class EarlyHead(msgspec.Struct, frozen=True):
    """The head that is sent before the answer, and the filler that follows it."""

    is_stream: bool
    headers: Callable[[], dict[str, str]]
    """Returns the headers of the answer that are known when the head is sent."""
    filler: bytes
    """Bytes that readers of the answer ignore: a comment of the stream, or white space before
    JSON."""


class KeepAlive:
    """The messages of one answer, and what is sent in their pauses. Everything runs in one event
    loop, and messages keep their order."""

    def __init__(self, send: Send, interval_s: float) -> None:
        self._send = send
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._head: EarlyHead | None = None
        self._started = False
        """Whether the answer's own head has been sent."""
        self._settled = False
        """Whether the answer is known: its own head is the next message."""
        self._head_left = False
        self._on_head: Callable[[], None] | None = None
        self._sent_s = 0.0
        """When the last message was sent, on the clock of the loop."""
        self._timer: asyncio.TimerHandle | None = None
        self._filling: asyncio.Task[None] | None = None

    @property
    def head_left(self) -> EarlyHead | None:
        """The head that was sent before the answer was known; None: no early head was sent."""
        return self._head if self._head_left else None

    def arm(self, head: EarlyHead) -> None:
        """Starts the timer: the request was read and waits from now on."""
        self._head, self._sent_s = head, self._loop.time()
        self._timer = self._loop.call_later(self._interval_s, self._on_timer)

    def call_on_head(self, callback: Callable[[], None]) -> None:
        """Calls `callback` when the early head of a stream is sent, or now if it was sent
        already."""
        if self._head_left:
            callback()
        else:
            self._on_head = callback

    def settle(self) -> EarlyHead | None:
        """Marks the answer as known, so that no early head is sent any more. Returns the early head
        that was sent before, if any."""
        self._settled = True
        return self.head_left

    def send(self, message: Message) -> Awaitable[None]:
        """Sends a message of the answer, like the `send` of the server."""
        self._sent_s = self._loop.time()
        if message["type"] == "http.response.start":
            self._started = True
            if self._head_left:
                return _nothing()
        elif not message.get("more_body", False):
            self._stop_timer()
        if self._filling is not None and not self._filling.done():
            return self._send_behind(self._filling, message)
        return self._send(message)

    def close(self) -> None:
        """Stops the timer and the filler. Called when the request has ended, with or without an
        error."""
        self._stop_timer()
        if self._filling is not None:
            self._filling.cancel()

    async def _send_behind(self, filling: asyncio.Task[None], message: Message) -> None:
        await asyncio.wait((filling,))
        await self._send(message)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        """Sends filler if nothing was sent for `interval_s`. A stream that flows costs little: its
        messages only record their time."""
        due_s = self._sent_s + self._interval_s
        if self._loop.time() < due_s:
            self._timer = self._loop.call_at(due_s, self._on_timer)
            return
        self._timer = self._loop.call_later(self._interval_s, self._on_timer)
        head = self._head
        if head is None or (self._settled and not self._started):
            return
        if self._started and not (self._head_left or head.is_stream):
            return
        if self._filling is None or self._filling.done():
            self._fill(head)

    def _fill(self, head: EarlyHead) -> None:
        starts = not (self._started or self._head_left)
        if starts:
            self._head_left = True
        self._filling = self._loop.create_task(self._send_filler(head, starts=starts))
        if starts and self._on_head is not None:
            self._on_head()

    async def _send_filler(self, head: EarlyHead, *, starts: bool) -> None:
        if starts:
            own = EVENT_HEADERS if head.is_stream else _WHOLE_HEADERS
            headers = {**own, **head.headers()}
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            await self._send({"type": "http.response.start", "status": 200, "headers": raw})
        body = {"type": "http.response.body", "body": head.filler, "more_body": True}
        await self._send(body)


async def _nothing() -> None:
    pass


def wants_early_head(request: Request) -> bool:
    """Returns whether the client accepts status 200 and blanks before a whole answer. Raises
    BadRequest."""
    value = request.headers.get(EARLY_HEAD, "0")
    if value not in ("0", "1"):
        raise BadRequest(
            f"the header {EARLY_HEAD}={shown(value)} must be 0, or 1 to allow status 200 and "
            "blanks before an answer that is not streamed",
            EARLY_HEAD,
        )
    return value == "1"


def stream_head(headers: Callable[[], dict[str, str]], filler: bytes) -> EarlyHead:
    return EarlyHead(is_stream=True, headers=headers, filler=filler)


def whole_head(headers: Callable[[], dict[str, str]]) -> EarlyHead:
    return EarlyHead(is_stream=False, headers=headers, filler=BLANK)
