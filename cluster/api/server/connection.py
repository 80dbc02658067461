"""One connection of the HTTP server, and the limits of its cost before and between its requests.

    connect ── head ──────────► body ───────────► answer ──► idle ── head ...
               head_timeout_s   transfer_timeout_s           idle_timeout_s
               MAX_HEAD_BYTES       1 KiB/s

uvicorn parses with llhttp, which does not limit anything: a header without end is collected and
copied with each new piece, and half a request is waited for forever. So bytes are fed to it in
slices, and a client that crosses a limit gets an error and is disconnected. An answer that is sent
before the body was read (401, 413, 415 ...) also closes the connection: no handler reads the rest
of the body.
"""

from __future__ import annotations

import asyncio
import enum
import http
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from swell.cluster.api.bodies.http_errors import HTTPError, error_body
from swell.cluster.api.server.cors import CorsRules
from swell.cluster.api.server.half_close import HalfCloseWatcher
from swell.cluster.api.server.request_head import head_refusal
from swell.cluster.api.server.response_framing import FramedResponse
from swell.cluster.api.server.stalled_reader import StalledReader
from swell.configs.schema import ServeConfig

MAX_HEAD_BYTES = 64 * 1024
"""The limit of the request line and headers together, and of the bytes between two chunks of a body
or after its last chunk."""
MAX_URL_BYTES = 8 * 1024
MAX_HEADERS = 256
MAX_PIPELINED = 16
"""The most requests that may wait for an earlier one on the same connection."""
MAX_CHUNKS = 4096
"""The most chunks of a body in one received piece: a client that sends tiny chunks causes much work
with few bytes."""
MIN_BODY_RATE = 1024
"""The minimum average rate of a body, in bytes per second."""
LINGER_S = 2.0
"""How long a client that is still sending may read the answer before the connection is closed."""
_SLICE_BYTES = 8 * 1024


class _ReadState(enum.Enum):
    """The part of a request that the client is sending, or sent last."""

    HEAD = enum.auto()
    BODY = enum.auto()
    COMPLETE = enum.auto()
    """A whole request has arrived."""


class LimitedConnection(HttpToolsProtocol):
    """A connection with limits. uvicorn creates the instances, so `limits` and `cors` are set by a
    subclass that `limited_protocol` makes."""

    limits: ServeConfig
    most_connections: str
    """The limit of connections and its reason, for error messages."""
    cors: CorsRules
    """The origins whose pages may read the reason of a refusal."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.timeout_keep_alive = self.limits.idle_timeout_s  # type: ignore[assignment]
        self.url, self.headers = b"", []
        self._read_state = _ReadState.HEAD
        self._head_bytes = 0
        """Bytes received in the state HEAD, or since the last part of a body."""
        self._chunks = 0
        """Chunks of the body in the received piece."""
        self._refusal: HTTPError | None = None
        """The reason why the connection is closed."""
        self._deferred: HTTPError | None = None
        """The refusal of a request, while the requests that arrived before it are answered."""
        self._reparsing_head = False
        """Whether the parser is being fed a head for the second time."""
        self._closing = False
        """Whether further received bytes are dropped."""
        self._answering: RequestResponseCycle | None = None
        """The request that the application handles; `cycle` is the newest one."""
        self._response: FramedResponse | None = None
        """The response of `_answering`."""
        self._half_closed: HalfCloseWatcher | None = None
        self._deadline_s = 0.0
        self._read_timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------ the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._stalled = StalledReader(
            self.loop,
            transport,
            self.limits.transfer_timeout_s,
            self._has_unsent,
            lambda: not self._is_idle(),
        )
        if len(self.connections) > self.limits.max_connections:
            self.connections.discard(self)
            self._refuse(
                HTTPError(
                    503,
                    f"this server already has its limit of connections, {self.most_connections}; "
                    "try again later",
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
        """Handles the end of the client's sending. Returns False if the transport should close, and
        True if requests that arrived completely must be answered first."""
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
            self._half_closed = HalfCloseWatcher(self.loop, self.transport, lambda: self._response)
        return True

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        self._response = framed = FramedResponse(cycle, app)
        self._stalled.start()
        super()._start_asgi_task(cycle, framed)  # type: ignore[arg-type]  # Starlette's types

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
        """Works like uvicorn's `data_received`, but answers a request that offers a protocol
        upgrade as HTTP/1.1, with the body that the parser leaves out."""
        self._unset_keepalive_if_required()
        try:
            while part:
                part = self._parsed(part)
        except httptools.HttpParserError:
            text = (
                "the received bytes are not a valid request of HTTP/1.1, or the body does not "
                "match its headers"
            )
            self._refusal = self._refusal or HTTPError(400, text, "invalid_request")

    def _parsed(self, part: bytes) -> bytes:
        """Parses `part`. Returns the rest after a request that offers another protocol."""
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade as offer:
            if self._read_state is _ReadState.BODY:
                self._parse_body()
            return part[offer.args[0] :]
        return b""

    def _parse_body(self) -> None:
        """Replaces the parser, which takes the following bytes for another protocol, with one that
        takes them for the body that the head announces. Otherwise bytes that a proxy takes for a
        body could be a request to us, and bypass its rules (request smuggling)."""
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
        """Called when the client reads its answer more slowly than it is produced."""
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
        """Ignores trailers after a chunked body: a proxy on the way may have checked only the
        headers of the head."""
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
                f"more than {MAX_PIPELINED} pipelined requests wait on this connection",
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
            self.flow.resume_reading()  # otherwise nobody notices that the client has left

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle is not None and self.cycle.more_body and self.cycle.response_complete:
            self._linger()
        if self._deferred is not None and not self.pipeline and not self.transport.is_closing():
            assert self._answering is not None, "a deferred refusal waits for an answer"
            if self._answering.response_complete:
                self._write_refusal(self._deferred)
        if self._has_unsent():  # too little for `pause_writing`, but a connection waits for it
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
            return HTTPError(
                400,
                "the body arrives in chunks that are too small; send larger chunks",
                "chunks_too_small",
            )
        return None

    def _arm_read_timer(self, timeout_s: float) -> None:
        """Sets the deadline for the next bytes; none applies while a request is computed."""
        self._deadline_s = self.loop.time() + timeout_s
        if self._read_timer is not None and self._read_timer.when() <= self._deadline_s:
            return  # it will check the deadline
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
            # The client's bytes wait here for their reader.
            self._arm_read_timer(limits.transfer_timeout_s)
        elif self._read_state is _ReadState.COMPLETE:
            if self._is_idle():
                self.transport.close()
        else:
            what = (
                "no bytes of the body arrived for "
                f"serve.transfer_timeout_s={limits.transfer_timeout_s:g} s, or it is slower than "
                f"{MIN_BODY_RATE} bytes per second"
            )
            if self._read_state is _ReadState.HEAD:
                what = (
                    "the request head was not complete within "
                    f"serve.head_timeout_s={limits.head_timeout_s:g} s"
                )
            self._refuse(HTTPError(408, what, "request_timeout"))

    def _refuse(self, refusal: HTTPError) -> None:
        """Answers the current request with an error after all earlier ones are answered, and closes
        the connection. If its own answer has begun, the connection only closes."""
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
        self.flow.resume_reading()  # received bytes are dropped; notices a client that leaves

    def _disconnect(self, cycle: RequestResponseCycle) -> None:
        """Makes the request end as if its client had left."""
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
        """Closes the connection soon. The client may still be sending, and closing now would
        discard the answer before it is read, so received bytes are dropped for a moment."""
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
    """Returns the protocol class of a server with these limits. `configured` is the number of
    connections that the configuration asks for, before the limit of open files."""
    most = f"serve.max_connections={limits.max_connections}"
    if limits.max_connections < configured:
        most = f"{limits.max_connections} (its limit of open files, ulimit -n, allows no more)"
    members = {"limits": limits, "most_connections": most, "cors": CorsRules.of(limits)}
    return type("LimitedConnection", (LimitedConnection,), members)
