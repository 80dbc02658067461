"""The context of one HTTP request: facts besides its head and its body."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from swell.cluster.api.keep_alive import KeepAlive
from swell.cluster.client.requests.deadline import Deadline
from swell.configs.runtime.secret import SecretText

REQUEST_ID = "x-request-id"
MAX_REQUEST_ID_CHARS = 128
_REQUEST_ID = re.compile(rf"[!-~]{{1,{MAX_REQUEST_ID_CHARS}}}\Z")
_TRACE_HEADERS = ("traceparent", "tracestate")
_KEY = "swell.context"
"""Key of the ASGI scope."""


@dataclass(slots=True, kw_only=True, repr=False)
class RequestContext:
    """Made once, when the request arrives. The later steps add what they learn: the check of the
    key the owner, the body reader the fields of the body."""

    id: str
    """The client's `x-request-id`, or a generated id."""
    path: str
    """The path as the routes define it."""
    arrived_s: float
    """When the request arrived, on the clock of the event loop."""
    trace_headers: dict[str, str]
    """The headers that name the caller's span (W3C Trace Context)."""
    receive: Receive
    """Returns the client's next message: a part of the body, or its disconnect."""
    keep_alive: KeepAlive | None = None
    """None: no client waits for the answer on a connection."""
    deadline: Deadline | None = None
    """When the client gives up; None: the client sets no deadline."""
    body_bytes: int = 0
    """The size of the body, as a measure of the work that it causes."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Names that the body uses for known fields; errors print these."""
    warning: str | None = None
    """The ignored parts of the body, for a header of the answer."""
    _owner: SecretText | None = None
    """None: the key was not checked yet."""

    @property
    def owner(self) -> SecretText:
        """The name of the user's key, as `Access.check_user` returns it."""
        assert self._owner is not None, f"{self.path}: the key was not checked"
        return self._owner

    def set_owner(self, owner: SecretText) -> None:
        self._owner = owner

    def detached(self) -> RequestContext:
        """Returns the context of the same request with a client that never disconnects."""
        return replace(self, receive=_never, keep_alive=None)


def detached_context(headers: Headers, path: str, owner: SecretText) -> RequestContext:
    """Returns the context of a request that has no client any more, from its kept headers."""
    now_s = asyncio.get_running_loop().time()
    made = _new_context(headers, path, now_s, _never)
    made.set_owner(owner)
    return made


def context_of(request: Request) -> RequestContext:
    found: RequestContext = request.scope[_KEY]
    return found


def is_valid_request_id(id: str) -> bool:
    """Returns whether a client may choose this id: it is returned in a header and in ids."""
    return _REQUEST_ID.match(id) is not None


def route_path(scope: Scope) -> str:
    """Returns the path as the routes define it, without the prefix under which a proxy, such as Ray
    Serve's, mounts this application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class RequestContextMiddleware:
    """ASGI middleware that makes the `RequestContext`. Its `KeepAlive` sends nothing until it is
    armed."""

    def __init__(self, app: ASGIApp, keep_alive_s: float) -> None:
        self._app = app
        self._keep_alive_s = keep_alive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        now_s = asyncio.get_running_loop().time()
        context = _new_context(Headers(scope=scope), route_path(scope), now_s, receive)
        context.keep_alive = keep_alive = KeepAlive(send, self._keep_alive_s)
        scope[_KEY] = context
        try:
            await self._app(scope, receive, keep_alive.send)
        finally:
            keep_alive.close()


def _new_context(headers: Headers, path: str, now_s: float, receive: Receive) -> RequestContext:
    sent = headers.get(REQUEST_ID, "")
    return RequestContext(
        id=sent if is_valid_request_id(sent) else uuid.uuid4().hex,
        path=path,
        arrived_s=now_s,
        trace_headers={name: headers[name] for name in _TRACE_HEADERS if name in headers},
        receive=receive,
    )


async def _never() -> Any:
    await asyncio.get_running_loop().create_future()
