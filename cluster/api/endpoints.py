"""Endpoints of routes: every answer carries the id of its request, and every error has the format
of its route's API."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from swell.cluster.api.answers.sse import DONE, PING, event
from swell.cluster.api.bodies.http_errors import HTTPError, error_body, error_info
from swell.cluster.api.bodies.protocol_base import named_event
from swell.cluster.api.keep_alive import (
    EarlyHead,
    stream_head,
    wants_early_head,
    whole_head,
)
from swell.cluster.api.messages.message import Ping, messages_error, messages_status
from swell.cluster.api.messages.model_list import ANTHROPIC_VERSION
from swell.cluster.api.request_context import (
    MAX_REQUEST_ID_CHARS,
    REQUEST_ID,
    context_of,
    is_valid_request_id,
)
from swell.cluster.api.responses.events import ErrorEvent
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.params.field_path import rename_roots
from swell.configs.error_text import shown

Handler = Callable[[Request], Awaitable[Response]]

WARNING = "x-swell-warning"
"""The header that lists ignored fields of a request (`serve.unknown_fields: ignore`) and ignored
keywords of its schemas (`serve.schema_keywords: ignore`)."""
ANTHROPIC_REQUEST_ID = "request-id"


def json_response(
    body: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    content = body if isinstance(body, bytes) else msgspec.json.encode(body)
    return Response(content, status, headers=headers, media_type="application/json")


def error_response(error: Exception, request: Request) -> Response:
    """Returns the error in the format and with the status of the route's API."""
    if isinstance(error, BadRequest):
        error = error.renamed(rename_roots(context_of(request).aliases))
    info = error_info(error)
    if not is_anthropic(request):
        return json_response(error_body(info), info.status, info.headers)
    status = messages_status(info.status)
    body = messages_error(info.message, status, context_of(request).id)
    return json_response(body, status, info.headers)


def error_events(error: Exception, request: Request) -> bytes:
    """Returns the error as the last events of a stream whose head was sent before the answer was
    known."""
    if isinstance(error, BadRequest):
        error = error.renamed(rename_roots(context_of(request).aliases))
    info = error_info(error)
    if is_anthropic(request):
        return named_event(messages_error(info.message, info.status, context_of(request).id))
    if context_of(request).path == "/v1/responses":
        return named_event(ErrorEvent(code=info.code, message=info.message, param=info.param))
    return event(error_body(info)) + DONE


def arm_keep_alive(request: Request, *, stream: bool) -> None:
    """Starts the keep-alive of a request that was read and may wait now. Raises BadRequest."""
    keep_alive, wants_head = context_of(request).keep_alive, wants_early_head(request)
    if keep_alive is None:
        return
    if stream:
        ping = named_event(Ping()) if is_anthropic(request) else PING
        keep_alive.arm(stream_head(partial(_common_headers, request), ping))
    elif wants_head:
        keep_alive.arm(whole_head(partial(_common_headers, request)))


def is_anthropic(request: Request) -> bool:
    """Returns whether the route belongs to Anthropic's API, even if it does not exist. `/v1/models`
    belongs to both APIs: a header tells which client asks."""
    path = f"{context_of(request).path}/"
    is_shared = path.startswith("/v1/models/") and ANTHROPIC_VERSION in request.headers
    return is_shared or path.startswith("/v1/messages/")


def _check_request_id(request: Request) -> None:
    """Raises BadRequest if the sent id is invalid: it is returned in a header and in ids."""
    sent = request.headers.get(REQUEST_ID)
    if sent is not None and not is_valid_request_id(sent):
        raise BadRequest(
            f"the header {REQUEST_ID}={shown(sent)} must be 1 to {MAX_REQUEST_ID_CHARS} visible "
            "ASCII characters",
            REQUEST_ID,
        )


def with_error_handling(handler: Handler) -> Handler:
    """Converts any exception of a handler into a response; every response has the request's id."""

    async def run(request: Request) -> Response:
        try:
            _check_request_id(request)
            response = await handler(request)
            _settle(request)
        except ClientDisconnect:
            response = Response(status_code=499)
        except Exception as error:
            head = _settle(request)
            if head is not None and head.is_stream:
                response = Response(error_events(error, request))
            else:
                response = error_response(error, request)
        response.headers.update(_common_headers(request))
        return response

    return run


def _settle(request: Request) -> EarlyHead | None:
    """Marks the answer as known. Returns the head that was sent before, if any."""
    keep_alive = context_of(request).keep_alive
    return None if keep_alive is None else keep_alive.settle()


def _common_headers(request: Request) -> dict[str, str]:
    """Returns the headers of every response to the request."""
    context = context_of(request)
    headers = {REQUEST_ID: context.id}
    if context.warning:
        headers[WARNING] = context.warning
    if is_anthropic(request):
        headers[ANTHROPIC_REQUEST_ID] = context.id
    return headers


def route(path: str, handler: Handler, *methods: str) -> Route:
    return Route(path, with_error_handling(handler), methods=list(methods))


async def no_such_route(request: Request, error: Exception) -> Response:
    """Answers a path or a method that does not exist."""
    return await _refuse(request)


@with_error_handling
async def _refuse(request: Request) -> Response:
    """Raises HTTPError 404 or 405. HTTP requires that 405 lists all methods of a path, but
    Starlette only knows those of the first matching route."""
    path = f"{request.method} {request.url.path}"
    methods: set[str] = set()
    for one in request.app.routes:
        if isinstance(one, Route) and one.matches(request.scope)[0] is not Match.NONE:
            methods |= one.methods or set()
    if not methods:
        hint = _did_you_mean(request)
        raise HTTPError(404, f"{path} does not exist{hint}; see /openapi.json", "not_found")
    allow = {"allow": ", ".join(sorted(methods))}
    refusal = f"{path} is not allowed; see /openapi.json"
    raise HTTPError(405, refusal, "not_found", headers=allow)


def _did_you_mean(request: Request) -> str:
    """Returns a hint at the same path with exactly one `/v1`, for a client whose base URL lacks it
    or repeats it; empty if there is no such route."""
    bare = re.sub(r"^(/v1)+(?=/)", "", context_of(request).path)
    for path in (f"/v1{bare}", bare):
        scope = {**request.scope, "path": path, "root_path": ""}
        for one in request.app.routes:
            if isinstance(one, Route) and one.matches(scope)[0] is not Match.NONE:
                return f"; did you mean {shown(path)}?"
    return ""


class StripTrailingSlash:
    """ASGI middleware that removes a slash at the end of a path, except at the root of the server.
    Many clients follow a redirect without the body, or not at all."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].removesuffix("/")
            is_root = path == scope.get("root_path", "")
            scope = {**scope, "path": f"{path}/" if is_root else path}
        await self._app(scope, receive, send)
