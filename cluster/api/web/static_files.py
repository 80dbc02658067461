"""The files of the page: HTML, style sheets and JavaScript modules, read once."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent / "static"
MAX_BYTES = 150_000
"""The maximum size of all files."""
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
SECURITY_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class StaticFile(msgspec.Struct, frozen=True):
    """A file, and how it is sent."""

    media_type: str
    content: bytes
    compressed: bytes
    """The content with gzip."""
    etag: str


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


def file_response(
    request: Request, file: StaticFile, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns the file, or 304 if the browser has it. Browsers ask again each time, so that an
    upgraded server is never used with an old page."""
    sent = {
        **SECURITY_HEADERS,
        "etag": file.etag,
        "cache-control": "no-cache",
        "vary": "accept, accept-encoding",
        **(headers or {}),
    }
    known = request.headers.get("if-none-match", "")
    if known == "*" or file.etag in (tag.strip() for tag in known.split(",")):
        return Response(status_code=304, headers=sent)
    content = file.content
    if accepts(request, "accept-encoding", "gzip"):
        sent["content-encoding"] = "gzip"
        content = file.compressed
    return Response(content, headers=sent, media_type=file.media_type)


def accepts(request: Request, header: str, wanted: str) -> bool:
    """Returns whether an `accept` header names `wanted` itself, not only by a wildcard."""
    for part in ",".join(request.headers.getlist(header)).lower().split(","):
        name, *parameters = (text.strip() for text in part.split(";"))
        if name == wanted:
            return not any(_is_zero(text) for text in parameters)
    return False


def _is_zero(parameter: str) -> bool:
    name, _, value = parameter.partition("=")
    return name.strip() == "q" and value.strip().strip("0") in ("", ".")
