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
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from swell.cluster.api.request_context import route_path
from swell.configs.schema import ServeConfig

_ALL = "*"
_METHODS = ("GET", "POST", "DELETE", "OPTIONS")
_EXPOSED = (
    "x-request-id",
    "request-id",
    "x-swell-engine",
    "x-swell-version",
    "x-swell-warning",
    "retry-after",
    "idempotent-replayed",
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

    def headers_at(self, url: bytes, sent: Pairs) -> Pairs:
        """Returns the headers of an answer that the connection sends itself, for the part of a
        request that has arrived: it may be empty."""
        path = unquote(url.partition(b"?")[0].decode("latin-1"))
        if not self.origins or is_closed(path):
            return []
        origin = next((value for name, value in sent if name == b"origin"), b"")
        pairs = [(b"vary", b"Origin")]
        if _ALL in self.origins:
            origin = _ALL.encode()
        elif origin.decode("latin-1").lower() not in self.origins:
            return pairs
        exposed = ", ".join(_EXPOSED).encode()
        return [
            *pairs,
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", exposed),
        ]


def is_closed(path: str) -> bool:
    """Returns whether the path belongs to the admin API, which never sends CORS headers: operators
    use pages of the server itself, or none."""
    return f"{path}/".startswith(_CLOSED)


class Cors:
    """ASGI middleware: Starlette's CORS middleware around every path outside the admin API."""

    def __init__(self, app: ASGIApp, rules: CorsRules) -> None:
        self._app = app
        self._is_off = not rules.origins
        self._readable = CORSMiddleware(
            app,
            allow_origins=rules.origins,
            allow_methods=_METHODS,
            allow_headers=("*",),
            expose_headers=_EXPOSED,
            max_age=_MAX_AGE_S,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_unreadable = self._is_off or is_closed(route_path(scope))
        await (self._app if is_unreadable else self._readable)(scope, receive, send)
