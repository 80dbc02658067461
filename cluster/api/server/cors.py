"""Decides which pages may read answers of the server: `serve.cors_origins`.

A browser shows a page of another site an answer only if the answer names the page's origin, and
sends a *preflight* before it sends JSON or a key. Every answer outside the admin API carries the
headers: also errors, streams, and refusals of a connection before its request is complete
(`connection.py`). The rules of `access.py` still apply: a page cannot change the name under which
the server is known, or the content type that it requires.
"""

from __future__ import annotations

from urllib.parse import unquote

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import request_response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from swell.cluster.api.bodies.http_errors import HTTPError
from swell.cluster.api.routing import route_path, with_error_handling
from swell.cluster.text.params.sampling_params import shown
from swell.configs.schema import ServeConfig

_ALL = "*"
_METHODS = "GET, POST, DELETE, OPTIONS"
_HEADERS = ("authorization", "content-type", "x-api-key", "x-request-id", "x-request-timeout-s")
_EXPOSED = (
    "x-request-id, request-id, x-swell-engine, x-swell-version, x-swell-warning, retry-after, "
    "idempotent-replayed"
)
_CLOSED = ("/admin/", "/v1/load_lora_adapter/", "/v1/unload_lora_adapter/")
"""The paths of operators."""
_MAX_AGE_S = 600
"""How long a browser may cache a preflight."""

Pairs = list[tuple[bytes, bytes]]


class CorsRules(msgspec.Struct, frozen=True):
    """The origins whose pages may read answers. If empty, pages of other sites can read nothing."""

    origins: frozenset[str] = frozenset()

    @staticmethod
    def of(config: ServeConfig) -> CorsRules:
        return CorsRules(frozenset(one.lower().rstrip("/") for one in config.cors_origins))

    def allows(self, origin: str | None) -> bool:
        return _ALL in self.origins or (origin or "").lower() in self.origins

    def headers(self, path: str, origin: str | None) -> Pairs:
        """Returns the CORS headers of an answer at `path` for a page of `origin`; None: the origin
        is unknown."""
        if not self.origins or is_closed(path):
            return []
        pairs: Pairs = []
        if _ALL not in self.origins:
            pairs.append((b"vary", b"Origin"))
        if self.allows(origin):
            named = _ALL if _ALL in self.origins else origin or ""
            pairs.append((b"access-control-allow-origin", named.encode("latin-1")))
            pairs.append((b"access-control-expose-headers", _EXPOSED.encode()))
        return pairs

    def headers_at(self, url: bytes, sent: Pairs) -> Pairs:
        """Returns the CORS headers for the part of a request that has arrived, which may be
        empty."""
        path = unquote(url.partition(b"?")[0].decode("latin-1"))
        origins = [value.decode("latin-1") for name, value in sent if name == b"origin"]
        return self.headers(path, origins[0] if origins else None)


def is_closed(path: str) -> bool:
    """Returns whether the path belongs to the admin API, which never sends CORS headers: operators
    use pages of the server itself, or none."""
    return f"{path}/".startswith(_CLOSED)


class Cors:
    """ASGI middleware that adds CORS headers to every answer and answers preflights."""

    def __init__(self, app: ASGIApp, rules: CorsRules) -> None:
        self._app = app
        self._rules = rules
        self._preflight = request_response(with_error_handling(self._answer_preflight))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_off = scope["type"] != "http" or not self._rules.origins
        if is_off or is_closed(route_path(scope)):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        added = self._rules.headers(route_path(scope), headers.get("origin"))

        async def send_readable(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        app = self._preflight if _is_preflight(scope, headers) else self._app
        await app(scope, receive, send_readable)

    async def _answer_preflight(self, request: Request) -> Response:
        origin = request.headers["origin"]
        if not self._rules.allows(origin):
            raise HTTPError(
                403,
                f"pages of {shown(origin)} may not use this server; add the origin to "
                "serve.cors_origins",
                "origin_not_allowed",
            )
        wanted = request.headers.get("access-control-request-headers", "").lower().split(",")
        names = dict.fromkeys([*_HEADERS, *filter(None, (name.strip() for name in wanted))])
        return Response(
            status_code=204,
            headers={
                "access-control-allow-methods": _METHODS,
                "access-control-allow-headers": ", ".join(names),
                "access-control-max-age": str(_MAX_AGE_S),
            },
        )


def _is_preflight(scope: Scope, headers: Headers) -> bool:
    return (
        scope["method"] == "OPTIONS"
        and "origin" in headers
        and "access-control-request-method" in headers
    )
