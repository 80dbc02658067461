"""Routes of the page: `/` and `/docs` for browsers, and the files that they load. All files (HTML,
style sheets and JavaScript modules) are read once.

The page refers to its files and to the API by relative addresses, so that it works under a prefix
of a proxy. Its addresses must therefore have exactly the depth that it expects: another spelling is
redirected.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swell.cluster.api.bodies.http_errors import HTTPError
from swell.cluster.api.bodies.protocol_base import Body
from swell.cluster.api.endpoints import json_response, route
from swell.configs.error_text import shown

FOLDER = Path(__file__).parent / "static"
MAX_BYTES = 150_000
"""The maximum size of all files."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
_SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Welcome(Body, kw_only=True):
    """The answer to programs that read the root of the server."""

    name: str = "swell"
    version: str
    openapi: str = "/openapi.json"
    """The description of all routes."""
    docs: str = "/docs"
    """The same description for people."""


class StaticFile(msgspec.Struct, frozen=True):
    """A file, and how it is sent."""

    media_type: str
    content: bytes
    compressed: bytes
    """The content with gzip."""
    etag: str


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
        return _file_response(request, self._files["index.html"])

    async def _docs(self, request: Request) -> Response:
        if _is_browser(request) and _sent_path(request).endswith("/"):
            return _redirect("../docs")
        return _file_response(request, self._files["docs.html"])

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if (file := self._files.get(name)) is None:
            raise HTTPError(404, f"the page has no file {shown(name)}", "not_found")
        return _file_response(request, file)


def _is_browser(request: Request) -> bool:
    return _accepts(request, "accept", "text/html")


def _sent_path(request: Request) -> str:
    """Returns the path as the client sent it, with its slash at the end."""
    sent: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    return sent.decode("latin-1") or "/"


def _redirect(place: str) -> Response:
    """Redirects to a place relative to the address of the request."""
    return Response(status_code=307, headers={"location": place, "vary": "accept"})


@cache
def read_static_files() -> dict[str, StaticFile]:
    """Returns name -> file, with `/` between the folders of a name."""
    paths = sorted(path for path in FOLDER.rglob("*") if path.suffix in _TYPES)
    files = {path.relative_to(FOLDER).as_posix(): _read(path) for path in paths}
    total = sum(len(file.content) for file in files.values())
    assert total <= MAX_BYTES, f"the files in {FOLDER} have {total} bytes, more than {MAX_BYTES}"
    return files


def _read(path: Path) -> StaticFile:
    content = path.read_bytes()
    return StaticFile(
        media_type=_TYPES[path.suffix],
        content=content,
        compressed=gzip.compress(content, mtime=0),
        etag=f'W/"{hashlib.sha256(content).hexdigest()[:20]}"',
    )


def _file_response(
    request: Request, file: StaticFile, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns the file, or 304 if the browser has it. Browsers ask again each time, so that an
    upgraded server is never used with an old page."""
    sent = {
        **_SECURITY_HEADERS,
        "etag": file.etag,
        "cache-control": "no-cache",
        "vary": "accept, accept-encoding",
        **(headers or {}),
    }
    known = request.headers.get("if-none-match", "")
    if known == "*" or file.etag in (tag.strip() for tag in known.split(",")):
        return Response(status_code=304, headers=sent)
    content = file.content
    if _accepts(request, "accept-encoding", "gzip"):
        sent["content-encoding"] = "gzip"
        content = file.compressed
    return Response(content, headers=sent, media_type=file.media_type)


def _accepts(request: Request, header: str, wanted: str) -> bool:
    """Returns whether an `accept` header names `wanted` itself, not only by a wildcard."""
    for part in ",".join(request.headers.getlist(header)).lower().split(","):
        name, *parameters = (text.strip() for text in part.split(";"))
        if name == wanted:
            return not any(_is_zero(text) for text in parameters)
    return False


def _is_zero(parameter: str) -> bool:
    name, _, value = parameter.partition("=")
    return name.strip() == "q" and value.strip().strip("0") in ("", ".")
