"""One connection of the HTTP server, and what it may cost before and beside its requests.

    connect ── head ──────────► body ───────────► answer ──► idle ── head ...
               head_timeout_s   transfer_timeout_s           idle_timeout_s
               MAX_HEAD_BYTES       1 KiB/s

uvicorn parses with llhttp, which has no limits of its own: a header that never ends is gathered
anew with each piece of it, and a client that sends half a request is waited for without end. So
bytes are fed to it in slices, and a client that crosses a limit gets an answer and is closed. An
answer that was given before the body was read (401, 413, 415 ...) ends the connection too: no
handler reads what is still to come.
"""

from __future__ import annotations

import asyncio
import enum
import http
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from swell.cluster.api.http_errors import HTTPError, error_body
from swell.cluster.api.server.cors import CorsRules
from swell.cluster.api.server.half_close import HalfCloseWatcher
from swell.cluster.api.server.request_head import head_refusal
from swell.cluster.api.server.response_framing import with_framing
from swell.cluster.api.server.stalled_reader import StalledReader
from swell.configs.schema import ServeConfig

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together; also what may come between two parts of a chunked body, or
behind it."""
MAX_URL_BYTES = 8 * 1024
MAX_HEADERS = 256
MAX_PIPELINED = 16
"""Requests that may wait behind one on the same connection."""
MAX_CHUNKS = 4096
"""Parts of a chunked body that may come in one piece of the network's; a client that sends chunks
of a few bytes makes much work of little."""
MIN_BODY_RATE = 1024
"""Bytes a second, on average."""
LINGER_S = 2.0
"""A client that is still sending may read the answer to what it sent for so long."""
_SLICE_BYTES = 8 * 1024


class _ReadState(enum.Enum):
    """What the client is sending, or was."""

    HEAD = enum.auto()
    BODY = enum.auto()
    COMPLETE = enum.auto()
    """A whole request has come."""


class LimitedConnection(HttpToolsProtocol):
    """`limits` and `cors` are set by a subclass that `limited_protocol` makes: uvicorn makes the
    instances."""

    limits: ServeConfig
    most_connections: str
    """The limit of connections, and where it comes from."""
    cors: CorsRules
    """Which origins may read the reason of a refusal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeout_keep_alive = self.limits.idle_timeout_s  # type: ignore[assignment]
        self.url, self.headers = b"", []
        self._read_state = _ReadState.HEAD
        self._head_bytes = 0
        """Bytes in the stage HEAD, or since the last part of a body."""
        self._chunks = 0
        """Parts of a body in this piece of the network's."""
        self._refusal: HTTPError | None = None
        """Why the connection ends."""
        self._deferred: HTTPError | None = None
        """The same, while requests that came before the refused one are answered."""
        self._reparsing_head = False
        """The parser reads a head that was read."""
        self._closing = False
        """What still comes is not read."""
        self._answering: RequestResponseCycle | None = None
        """The request that the application has; `cycle` is the newest one."""
        self._half_closed: HalfCloseWatcher | None = None
        self._deadline_s = 0.0
        self._read_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------ the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stalled = StalledReader(
            self.loop, transport, self.limits.transfer_timeout_s, self._has_unsent
        )
        if len(self.connections) > self.limits.max_connections:
            self.connections.discard(self)
            self._refuse(
                HTTPError(
                    503,
                    f"this server has {self.most_connections} connections already; try again later",
                    "too_many_connections",
                )
            )
            return
        self._arm_read_timer(self.limits.head_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closing = True
        self._cancel_read_timer()
        self.resume_writing()
        self._stalled.stop()
        if self._half_closed is not None:
            self._half_closed.stop()
        if self._answering is not None and self._answering is not self.cycle:
            self._disconnect(self._answering)
        self.pipeline.clear()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """The client sends no more. False: the connection ends; what has come whole is answered
        before."""
        answering, deferred = self._answering, self._deferred is not None
        if answering is None or (self._closing and not deferred):
            return False
        if answering.response_complete or answering.more_body:
            return False
        if not deferred:
            if self.pipeline and self.cycle.more_body:
                self.pipeline.popleft()
            newest = self.pipeline[0][0] if self.pipeline else answering
            newest.keep_alive = False
        self._cancel_read_timer()
        if self._half_closed is None:
            self._half_closed = HalfCloseWatcher(self.loop, self.transport, lambda: self._answering)
        return True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, with_framing(cycle, app))

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        self._chunks = at = 0
        while at < len(data) and not self._closing and not self.transport.is_closing():
            part = data[at : at + _SLICE_BYTES]
            at += len(part)
            self._head_bytes += len(part)
            self._feed(part)
            if refusal := self._refusal or self._exceeded_limit():
                self._refuse(refusal)
        if self._read_state is _ReadState.COMPLETE and self._is_idle() and self._read_timer is None:
            # Blank lines have ended uvicorn's wait for the next request.
            self._arm_read_timer(self.limits.head_timeout_s)

    def _feed(self, part: bytes) -> None:
        """As uvicorn's `data_received`, but a request that offers a protocol upgrade is answered as
        HTTP/1.1, with the body that the parser leaves out."""
        self._unset_keepalive_if_required()
        try:
            while part:
                part = self._parsed(part)
        except httptools.HttpParserError:
            text = "what came is no request of HTTP/1.1, or no body that its head announces"
            self._refusal = self._refusal or HTTPError(400, text, "invalid_request")

    def _parsed(self, part: bytes) -> bytes:
        """What is left of it behind a request that offers another protocol."""
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade as offer:
            if self._read_state is _ReadState.BODY:
                self._parse_body()
            return part[offer.args[0] :]
        return b""

    def _parse_body(self) -> None:
        """The parser takes what follows for another protocol; a new one takes it for the body that
        the head has announced. What would be the next request to us, and a body to a proxy in
        between, could pass that proxy's rules."""
        version, url, headers = self.scope["http_version"].encode(), self.url, [*self.headers]
        head = [b"POST / HTTP/" + version, *(b": ".join(pair) for pair in self._framing())]
        self._reparsing_head = True
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join(head) + b"\r\n\r\n")
        self._reparsing_head = False
        self.url, self.headers[:] = url, headers

    def _framing(self) -> list[tuple[bytes, bytes]]:
        names = (b"content-length", b"transfer-encoding")
        return [(name, value) for name, value in self.headers if name in names]

    def pause_writing(self) -> None:
        """The client does not read its answer as fast as it comes."""
        super().pause_writing()
        self._stalled.start()

    def _has_unsent(self) -> bool:
        return self.flow.write_paused or self.transport.get_write_buffer_size() > 0

    # --------------------------------------------------------------------------------- the parser

    def on_message_begin(self) -> None:
        if self._reparsing_head:
            return
        super().on_message_begin()
        self._read_state, self._head_bytes = _ReadState.HEAD, 0
        if self._read_timer is None:
            self._arm_read_timer(self.limits.head_timeout_s)

    def on_header(self, name: bytes, value: bytes) -> None:
        """What comes behind a chunked body is no header: a server on the way may have checked those
        of the head alone."""
        if self._read_state is not _ReadState.BODY:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._reparsing_head:
            return
        self._head_bytes = 0
        parser = self.parser
        self._refusal = (
            self._refusal
            or self._exceeded_limit()
            or head_refusal(parser.get_method(), self.url, parser.get_http_version(), self.headers)
        )
        if self._refusal is None and len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = HTTPError(
                400,
                f"more than {MAX_PIPELINED} requests wait on this connection",
                "too_many_requests",
            )
        if self._refusal is not None:
            return
        self._read_state = _ReadState.BODY
        super().on_headers_complete()
        self._arm_read_timer(self.limits.transfer_timeout_s)

    def on_body(self, body: bytes) -> None:
        if self._refusal is not None:
            return
        super().on_body(body)
        self._chunks += 1
        self._head_bytes = 0
        self._deadline_s = min(
            self.loop.time() + self.limits.transfer_timeout_s,
            self._deadline_s + len(body) / MIN_BODY_RATE,
        )

    def on_message_complete(self) -> None:
        offers_protocol = self.parser.should_upgrade() and self._read_state is _ReadState.BODY
        if self._refusal is not None or (offers_protocol and self._framing()):
            return
        self._read_state, self._head_bytes = _ReadState.COMPLETE, 0
        super().on_message_complete()
        self._cancel_read_timer()
        if 0 < len(self.pipeline) < MAX_PIPELINED:
            self.flow.resume_reading()  # or nothing says that the client has left

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is not None and self.cycle.more_body and self.cycle.response_complete:
            self._linger()
        if self._deferred is not None and not self.pipeline and not self.transport.is_closing():
            assert self._answering is not None, "an answer has ended"
            if self._answering.response_complete:
                self._write_refusal(self._deferred)
        if self._has_unsent():  # too little for `pause_writing`, and a connection waits for it
            self._stalled.start()

    # --------------------------------------------------------------------------------- the limits

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _exceeded_limit(self) -> HTTPError | None:
        code = "request_too_large"
        if len(self.url) > MAX_URL_BYTES:
            return HTTPError(414, f"the URL has more than {MAX_URL_BYTES} bytes", code)
        if len(self.headers) > MAX_HEADERS:
            return HTTPError(431, f"the request has more than {MAX_HEADERS} headers", code)
        if self._head_bytes > MAX_HEAD_BYTES:
            what = "head" if self._read_state is _ReadState.HEAD else "framing"
            return HTTPError(
                431, f"the request's {what} has more than {MAX_HEAD_BYTES} bytes", code
            )
        if self._chunks > MAX_CHUNKS:
            return HTTPError(400, "the body comes in chunks that are too small", "chunks_too_small")
        return None

    def _arm_read_timer(self, timeout_s: float) -> None:
        """More must come within this time; a request that is being computed is not waited for."""
        self._deadline_s = self.loop.time() + timeout_s
        if self._read_timer is not None and self._read_timer.when() <= self._deadline_s:
            return  # it will look at the deadline
        if self._read_timer is not None:
            self._read_timer.cancel()
        self._read_timer = self.loop.call_at(self._deadline_s, self._on_read_timer)

    def _cancel_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _on_read_timer(self) -> None:
        self._read_timer = None
        limits = self.limits
        if self.loop.time() < self._deadline_s:
            self._read_timer = self.loop.call_at(self._deadline_s, self._on_read_timer)
        elif self.flow.read_paused:
            # What the client has sent waits here for its reader.
            self._arm_read_timer(limits.transfer_timeout_s)
        elif self._read_state is _ReadState.COMPLETE:
            if self._is_idle():
                self.transport.close()
        else:
            what = (
                f"the body stopped for serve.transfer_timeout_s={limits.transfer_timeout_s:g} s, "
                f"or comes with less than {MIN_BODY_RATE} bytes a second"
            )
            if self._read_state is _ReadState.HEAD:
                what = f"no whole head came within serve.head_timeout_s={limits.head_timeout_s:g} s"
            self._refuse(HTTPError(408, what, "request_timeout"))

    def _refuse(self, refusal: HTTPError) -> None:
        """Answer the request that comes, behind all that came before it, and close the connection.
        Where its own answer has begun, there is no other one."""
        if self._closing or self.transport.is_closing():
            return
        refused = self.cycle if self._read_state is _ReadState.BODY else None
        if refused is not None and self.pipeline and self.pipeline[0][0] is refused:
            self.pipeline.popleft()
        elif refused is not None and refused is self._answering:
            self._disconnect(refused)
            if refused.response_started and not refused.response_complete:
                self._closing = True
                self.transport.close()
                return
        answering = self._answering
        if (
            answering is None
            or answering is refused
            or (answering.response_complete and not self.pipeline)
        ):
            self._write_refusal(refusal)
            return
        self._deferred, self._closing = refusal, True
        self._cancel_read_timer()
        self.flow.resume_reading()  # what comes is thrown away; a client that leaves is noticed

    def _disconnect(self, cycle: RequestResponseCycle) -> None:
        """The request ends as if its client had left."""
        cycle.disconnected = True
        cycle.message_event.set()

    def _write_refusal(self, refusal: HTTPError) -> None:
        status = refusal.info.status
        body = msgspec.json.encode(error_body(refusal.info))
        head = (
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
            "connection: close\r\n"
        )
        lines = [b"%b: %b\r\n" % pair for pair in self.cors.headers_at(self.url, self.headers)]
        self.transport.write(b"".join([head.encode(), *lines, b"\r\n", body]))
        self._linger()

    def _linger(self) -> None:
        """The answer is out, and the client may still be sending: to close now would take the
        answer from it. What comes is thrown away, for a moment."""
        self._closing = True
        self._unset_keepalive_if_required()
        self._cancel_read_timer()
        self.flow.resume_reading()
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._read_timer = self.loop.call_later(LINGER_S, self.transport.close)


def limited_protocol(limits: ServeConfig, configured: int) -> type[LimitedConnection]:
    """The protocol of a server with these limits; `configured`: connections that it should have,
    were there no limit of open files."""
    most = f"serve.max_connections={limits.max_connections}"
    if limits.max_connections < configured:
        most = f"{limits.max_connections} (its limit of open files, ulimit -n, allows no more)"
    members = {"limits": limits, "most_connections": most, "cors": CorsRules.of(limits)}
    return type("LimitedConnection", (LimitedConnection,), members)
