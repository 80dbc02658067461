"""What every route needs of HTTP: bodies with a limit, errors, keys, event streams."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import uuid
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
)
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from swell.cluster.api.messages import errors as anthropic
from swell.cluster.api.protocol_base import error_body
from swell.cluster.api.server.content_encoding import ACCEPTED, UnknownEncoding, body_decoder
from swell.cluster.api.server.paths import route_path
from swell.cluster.client.admission import TooManyWaiting
from swell.cluster.client.deadline import Deadline, RequestTimedOut
from swell.cluster.client.request_state import EngineGone, RequestFailed
from swell.cluster.client.router import NoEngine
from swell.cluster.text.field_path import rename_roots
from swell.cluster.text.sampling_params import BadRequest, shown
from swell.configs.log import StructuredLogger
from swell.configs.schema import ConfigError

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Any]]

_RETRY_AFTER = {"retry-after": "1"}
REQUEST_ID = "x-request-id"
WARNING = "x-swell-warning"
"""What of a request was ignored (`serve.unknown_fields: ignore`)."""
ANTHROPIC_REQUEST_ID = "request-id"
MAX_REQUEST_ID_CHARS = 128
IS_EVENT_STREAM = "swell.events"
"""Key of the request's state: its answer is a stream of events, each in a chunk of its own."""
_REQUEST_ID = re.compile(rf"[!-~]{{1,{MAX_REQUEST_ID_CHARS}}}\Z")


class HTTPError(Exception):
    """An answer with a status of its own."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = kind
        self.headers = headers or {}


class ClientGone(Exception):
    """The client closed its connection: nobody reads the answer."""


def json_response(
    body: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Response(content, status, headers=headers, media_type="application/json")


class ErrorInfo(NamedTuple):
    """What an error is to a client, whatever the API."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    """OpenAI's `type`."""
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = {}


def error_info(error: Exception) -> ErrorInfo:
    match error:
        case BadRequest():
            status = 404 if error.code == "model_not_found" else 400
            return ErrorInfo(status, error.message, param=error.param, code=error.code)
        case HTTPError():
            return ErrorInfo(
                error.status, str(error), error.kind, code=error.code, headers=error.headers
            )
        case TooManyWaiting():
            again = {"retry-after": str(error.retry_after_s)}
            return ErrorInfo(429, str(error), "rate_limit_exceeded", code=error.code, headers=again)
        case RequestTimedOut():
            return ErrorInfo(408, str(error), "timeout_error", code="request_timeout")
        case NoEngine():
            return ErrorInfo(
                503, str(error), "server_error", code="no_engine", headers=_RETRY_AFTER
            )
        case EngineGone():
            return ErrorInfo(500, str(error), "server_error", code="engine_failed")
        case RequestFailed():
            return ErrorInfo(500, str(error), "server_error", code="request_failed")
    StructuredLogger("cluster.ingress").error(
        "unexpected", error=f"{type(error).__name__}: {error}"
    )
    return ErrorInfo(500, "internal error", "server_error")


def error_response(error: Exception, request: Request) -> Response:
    """The error as the API of the route tells it, with the status that its kind asks for."""
    if isinstance(error, BadRequest):
        error = error.renamed(rename_roots(getattr(request.state, "aliases", {})))
    status, message, kind, param, code, headers = error_info(error)
    if _is_anthropic(request):
        status = anthropic.status_of(status)
        body = anthropic.error_body(message, status, request_id(request))
    else:
        body = error_body(message, type=kind, param=param, code=code)
    return json_response(body, status, headers)


def _is_anthropic(request: Request) -> bool:
    """Whether the route is one of Anthropic's API, also where there is none."""
    return f"{route_path(request.scope)}/".startswith("/v1/messages/")


def request_id(request: Request) -> str:
    """The id that the request brings in `x-request-id`, or one that it gets here, once."""
    state = request.state
    if not hasattr(state, "request_id"):
        state.request_id = request.headers.get(REQUEST_ID) or uuid.uuid4().hex
    return str(state.request_id)


def _check_request_id(request: Request) -> None:
    """It comes back in a header and in ids, so it must be able to stand there."""
    told = request.headers.get(REQUEST_ID)
    if told is not None and not _REQUEST_ID.match(told):
        request.state.request_id = uuid.uuid4().hex
        raise BadRequest(
            f"the header {REQUEST_ID}={shown(told)} must be 1 to {MAX_REQUEST_ID_CHARS} visible "
            "ASCII characters",
            REQUEST_ID,
        )


def with_error_handling(handler: Handler) -> Handler:
    """Turn whatever a handler raises into an answer; every answer tells its request's id."""

    async def run(request: Request) -> Any:
        try:
            _check_request_id(request)
            response = await handler(request)
        except (ClientGone, ClientDisconnect):
            response = Response(status_code=499)
        except Exception as error:
            response = error_response(error, request)
        response.headers[REQUEST_ID] = request_id(request)
        if warning := getattr(request.state, "warning", None):
            response.headers[WARNING] = warning
        if _is_anthropic(request):
            response.headers[ANTHROPIC_REQUEST_ID] = request_id(request)
        return response

    return run


def route(path: str, handler: Handler, *methods: str) -> Route:
    return Route(path, with_error_handling(handler), methods=list(methods))


async def no_such_route(request: Request, error: Exception) -> Any:
    """A path or a method that is not ours; Starlette knows which. It tells the methods of the
    first route of a path only, and HTTP wants all of them."""

    async def refuse(request: Request) -> Any:
        path = f"{request.method} {request.url.path}"
        if getattr(error, "status_code", 404) != 405:
            raise HTTPError(404, f"{path} does not exist; see /openapi.json", "not_found")
        raise HTTPError(
            405,
            f"{path} is not allowed; see /openapi.json",
            "not_found",
            headers={"allow": ", ".join(_methods_at(request))},
        )

    return await with_error_handling(refuse)(request)


def _methods_at(request: Request) -> list[str]:
    methods: set[str] = set()
    for one in request.app.routes:
        if isinstance(one, Route) and one.matches(request.scope)[0] is not Match.NONE:
            methods |= one.methods or set()
    return sorted(methods)


class StripTrailingSlash:
    """ASGI middleware: a path with a slash at its end is the one without. A redirect would be
    followed without the body, or not at all, by many clients."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and len(scope["path"]) > 1:
            scope = {**scope, "path": scope["path"].removesuffix("/")}
        await self._app(scope, receive, send)


def require_json(request: Request) -> None:
    """Raises HTTPError 415 unless the request says that it sends JSON. A page of another site
    cannot say so without asking first, which `serve.cors_origins` alone allows."""
    sent = request.headers.get("content-type", "")
    kind = sent.split(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPError(
            415, f"content-type {shown(kind)} is not supported; send 'application/json'"
        )


async def read_json_parts(
    request: Request, limit_bytes: int, limit_name: str = "serve.max_body_bytes"
) -> AsyncGenerator[bytes]:
    """The body of a JSON request as it comes, unpacked. Raises HTTPError before more than the limit
    came, or was unpacked, and BadRequest where it cannot be unpacked."""
    require_json(request)
    try:
        unpack = body_decoder(request)
    except UnknownEncoding as error:
        raise HTTPError(415, str(error), headers={"accept-encoding": ACCEPTED}) from None
    too_long = HTTPError(
        413, f"the body has more than {limit_name}={limit_bytes} bytes", "request_too_large"
    )
    told = request.headers.get("content-length", "")
    if told.isascii() and told.isdigit() and (len(told) > 18 or int(told) > limit_bytes):
        raise too_long
    size = came = 0
    async for part in request.stream():
        came += len(part)
        for piece in unpack.pieces(part):
            size += len(piece)
            if max(size, came) > limit_bytes:
                raise too_long
            yield piece
            if piece is not part:
                await asyncio.sleep(0)
        if came > limit_bytes:
            raise too_long
    unpack.end()


async def read_short_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body of a JSON request that is short in any case."""
    parts = read_json_parts(request, limit_bytes, "the limit here")
    return b"".join([part async for part in parts])


async def with_cancellation(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client leaves first (ClientGone)."""
    task: asyncio.Future[T] = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_listen_for_disconnect(request.receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for future in (task, leaving):
            if not future.done():
                future.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await future


async def with_deadline(request: Request, work: Awaitable[T]) -> T:
    """As `with_cancellation`, and no longer than the client waits (RequestTimedOut)."""
    deadline: Deadline | None = getattr(request.state, "deadline", None)
    limit = asyncio.timeout_at(None if deadline is None else deadline.at_s)
    try:
        async with limit:
            return await with_cancellation(request, work)
    except TimeoutError:
        if deadline is None or not limit.expired():
            raise
        raise RequestTimedOut(deadline.timeout_s) from None


async def _listen_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStreamResponse:
    """A server-sent event stream over ready-made bytes; ends when the client leaves. `on_end` is
    called once, however it ends."""

    def __init__(
        self,
        events: AsyncGenerator[bytes],
        headers: Mapping[str, str],
        on_end: Callable[[], None],
    ) -> None:
        self._events = events
        self._on_end = on_end
        self.headers = MutableHeaders(
            {
                "content-type": "text/event-stream; charset=utf-8",
                "cache-control": "no-cache",
                "x-accel-buffering": "no",
                **headers,
            }
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})[IS_EVENT_STREAM] = True
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(_listen_for_disconnect(receive))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            self._on_end()
            for future in (writing, leaving):
                if not future.done():
                    future.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await future

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.headers.raw})
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class ApiKeys:
    """Keys of a file, one a line, `#` starts a comment. No file: everybody may enter."""

    def __init__(self, path: str | None, setting: str) -> None:
        self._hashes: list[bytes] | None = None
        if path is None:
            return
        try:
            lines = Path(path).read_text().splitlines()
        except OSError as error:
            raise ConfigError(f"{setting}={path!r} cannot be read: {error.strerror}") from None
        keys = [line.split("#")[0].strip() for line in lines]
        self._hashes = [hashlib.sha256(key.encode()).digest() for key in keys if key]
        if not self._hashes:
            raise ConfigError(f"{setting}={path!r} holds no key")

    def check(self, request: Request) -> None:
        """Raises HTTPError 401 unless the request carries one of the keys."""
        if self._hashes is None:
            return
        if not any(map(self._is_valid, _presented_keys(request))):
            raise HTTPError(
                401,
                "send a valid key: 'Authorization: Bearer KEY', or 'x-api-key: KEY'",
                "invalid_api_key",
            )

    def owner(self, request: Request) -> str:
        """Names the key that the request shows, without telling it: what is kept for it, no other
        key finds. Empty where there are no keys. Raises as `check`."""
        self.check(request)
        if self._hashes is None:
            return ""
        key = next(filter(self._is_valid, _presented_keys(request)))
        return hashlib.sha256(key.encode()).hexdigest()

    def _is_valid(self, key: str) -> bool:
        shown = hashlib.sha256(key.encode()).digest()
        known = [hmac.compare_digest(shown, one) for one in self._hashes or ()]
        return any(known)


def _presented_keys(request: Request) -> Iterator[str]:
    """OpenAI's clients send the one, Anthropic's the other or both."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield key.strip()
    if "x-api-key" in request.headers:
        yield request.headers["x-api-key"].strip()
