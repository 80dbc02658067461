"""Routes of the page: `/` and `/docs` for browsers, and the files that they load.

The page refers to its files and to the API by relative addresses, so that it works under a prefix
of a proxy. Its addresses must therefore have exactly the depth that it expects: another spelling is
redirected.
"""

from __future__ import annotations

import importlib.metadata

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swell.cluster.api.bodies.http_errors import HTTPError
from swell.cluster.api.bodies.protocol_base import Body
from swell.cluster.api.endpoints import json_response, route
from swell.cluster.api.web.static_files import accepts, file_response, read_static_files
from swell.configs.error_text import shown


class Welcome(Body, kw_only=True):
    """The answer to programs that read the root of the server."""

    name: str = "swell"
    version: str
    openapi: str = "/openapi.json"
    """The description of all routes."""
    docs: str = "/docs"
    """The same description for people."""


class PageRoutes:
    """The files contain nothing about this server, so that no key is needed to read them."""

    def __init__(self) -> None:
        self._files = read_static_files()
        self._welcome = Welcome(version=importlib.metadata.version("swell"))

    def routes(self) -> list[Route]:
        return [
            route("/", self._root, "GET"),
            route("/docs", self._docs, "GET"),
            route("/ui/{name:path}", self._file, "GET"),
        ]

    async def _root(self, request: Request) -> Response:
        if not _is_browser(request):
            return json_response(self._welcome, headers={"vary": "accept"})
        sent = _sent_path(request)
        if not sent.endswith("/"):
            return _redirect(f"{sent.rpartition('/')[2]}/")
        return file_response(request, self._files["index.html"])

    async def _docs(self, request: Request) -> Response:
        if _is_browser(request) and _sent_path(request).endswith("/"):
            return _redirect("../docs")
        return file_response(request, self._files["docs.html"])

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if (file := self._files.get(name)) is None:
            raise HTTPError(404, f"the page has no file {shown(name)}", "not_found")
        return file_response(request, file)


def _is_browser(request: Request) -> bool:
    return accepts(request, "accept", "text/html")


def _sent_path(request: Request) -> str:
    """Returns the path as the client sent it, with its slash at the end."""
    sent: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    return sent.decode("latin-1") or "/"


def _redirect(place: str) -> Response:
    """Redirects to a place relative to the address of the request."""
    return Response(status_code=307, headers={"location": place, "vary": "accept"})
