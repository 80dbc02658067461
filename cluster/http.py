"""What every route needs of HTTP: bodies with a limit, OpenAI's errors, keys, event streams."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from swell.cluster.openai.responses import error_body
from swell.cluster.params import BadRequest
from swell.cluster.routing.router import NoEngine
from swell.cluster.tickets import EngineGone
from swell.configs.log import FactLogger
from swell.configs.schema import ConfigError

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Any]]

_RETRY_AFTER = {"retry-after": "1"}


class HTTPError(Exception):
    """An answer with a status of its own."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = kind


class ClientGone(Exception):
    """The client closed its connection: nobody reads the answer."""


def json_response(
    body: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Response(content, status, headers=headers, media_type="application/json")


def error_response(error: Exception) -> Response:
    """OpenAI's error body, with the status that the kind of error asks for."""
    match error:
        case BadRequest():
            status = 404 if error.code == "model_not_found" else 400
            return json_response(error_body(error), status)
        case HTTPError():
            body = error_body(str(error), type=error.kind, code=error.code)
            return json_response(body, error.status)
        case NoEngine():
            body = error_body(str(error), type="server_error", code="no_engine")
            return json_response(body, 503, _RETRY_AFTER)
        case EngineGone():
            body = error_body(str(error), type="server_error", code="engine_failed")
            return json_response(body, 500)
    FactLogger("cluster.ingress").error("unexpected", error=f"{type(error).__name__}: {error}")
    return json_response(error_body("internal error", type="server_error"), 500)


def guarded(handler: Handler) -> Handler:
    """Turn whatever a handler raises into an answer."""

    async def run(request: Request) -> Any:
        try:
            return await handler(request)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=499)
        except Exception as error:
            return error_response(error)

    return run


def route(path: str, handler: Handler, *methods: str) -> Route:
    return Route(path, guarded(handler), methods=list(methods))


async def no_such_route(request: Request, error: Exception) -> Response:
    """A path or a method that is not ours; Starlette knows which."""
    status = getattr(error, "status_code", 404)
    what = "is not allowed" if status == 405 else "does not exist"
    message = f"{request.method} {request.url.path} {what}; see /openapi.json"
    return error_response(HTTPError(status, message, "not_found"))


async def read_json_body(request: Request, limit_bytes: int) -> bytes:
    """The body of a JSON request. Raises HTTPError before more than the limit is held."""
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPError(415, f"content-type {kind!r} is not supported; send application/json")
    told = request.headers.get("content-length", "")
    parts: list[bytes] = []
    size = 0
    too_long = told.isdigit() and int(told) > limit_bytes
    if not too_long:
        async for part in request.stream():
            size += len(part)
            if size > limit_bytes:
                too_long = True
                break
            parts.append(part)
    if too_long:
        raise HTTPError(
            413,
            f"the body has more than serve.max_body_bytes={limit_bytes} bytes",
            "request_too_large",
        )
    return b"".join(parts)


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client leaves first (ClientGone)."""
    task: asyncio.Future[T] = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request.receive))
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


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """A server-sent event stream over ready-made bytes; ends when the client leaves."""

    def __init__(self, events: AsyncGenerator[bytes], headers: Mapping[str, str]) -> None:
        self._events = events
        self._headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *((name.encode(), value.encode()) for name, value in headers.items()),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writing = asyncio.ensure_future(self._write(send))
        leaving = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((writing, leaving), return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            for future in (writing, leaving):
                if not future.done():
                    future.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await future

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        async with contextlib.aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class KeyRing:
    """Bearer keys of a file, one a line, `#` starts a comment. No file: everybody may enter."""

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
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        shown = hashlib.sha256(key.strip().encode()).digest()
        known = [hmac.compare_digest(shown, one) for one in self._hashes]
        if scheme.lower() != "bearer" or not any(known):
            raise HTTPError(401, "send a valid key: 'Authorization: Bearer KEY'", "invalid_api_key")
