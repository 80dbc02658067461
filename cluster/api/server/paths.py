"""Where a request goes."""

from __future__ import annotations

from starlette.types import Scope


def route_path(scope: Scope) -> str:
    """The path as the routes have it: without the prefix at which a proxy, as Ray Serve's, has this
    application."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))
