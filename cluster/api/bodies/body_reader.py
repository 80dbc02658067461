"""Reads request bodies up to their limits, then decodes and checks them off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import Request

from swell.cluster.api.bodies.content_encoding import body_decoder
from swell.cluster.api.bodies.http_errors import RETRY_AFTER, HTTPError
from swell.cluster.api.request_context import RequestContext, context_of
from swell.cluster.text.prompt.thread_offload import OffloadPool
from swell.cluster.text.schema.decode import read
from swell.cluster.text.schema.request_body import RequestBody
from swell.configs.error_text import shown
from swell.configs.schema import ServeConfig

Body = TypeVar("Body", bound=RequestBody)

HELD_BODIES = 16
"""The memory for bodies, in bodies of the largest size, shared by all requests. If it is full, a
client that sends more than an equal share is refused, so that a few clients that send large bodies
slowly cannot keep out the others. The total never exceeds twice this limit."""
MAX_WARNED = 16
"""The most fields that the header of a warning names."""
MAX_WARNED_CHARS = 64
"""The longest name that a warning shows, in characters; longer ones are shortened."""


class BodyReader:
    """Reads the bodies of one ingress. Bytes count towards the limit from their arrival until they
    are decoded."""

    def __init__(
        self,
        config: ServeConfig,
        offload: OffloadPool,
        on_ignored: Callable[[Mapping[str, int]], None],
    ) -> None:
        """`on_ignored` counts the ignored fields of conversation histories, by label."""
        self._unknown = config.unknown_fields
        self._on_ignored = on_ignored
        self._max_body_bytes = config.max_body_bytes
        self._max_held_bytes = config.max_body_bytes * HELD_BODIES
        self._offload = offload
        self.held_bytes = 0
        self._readers = 0

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """Returns the checked body of an authorized request. Raises BadRequest and HTTPError."""
        parts: list[bytes] = []
        size = 0
        self._readers += 1
        try:
            async with aclosing(read_json_parts(request, self._max_body_bytes)) as coming:
                async for part in coming:
                    self.held_bytes += len(part)
                    size += len(part)
                    parts.append(part)
                    self._check_room(size)
            context = context_of(request)
            context.body_bytes = size
            body, stripped = await self._offload.run_sized(
                size, lambda: read(b"".join(parts), kind, self._unknown)
            )
            self._on_ignored(stripped.ignored)
            context.aliases = stripped.aliases
            context.warning = warning_of(stripped.warnings)
            return body
        finally:
            self._readers -= 1
            self.held_bytes -= size

    def _check_room(self, size: int) -> None:
        """Raises HTTPError if a request that holds `size` bytes leaves too little room for the
        others."""
        is_share = size * self._readers <= self._max_held_bytes
        if self.held_bytes > self._max_held_bytes and not is_share:
            raise HTTPError(
                503,
                f"the request bodies in memory use all of the limit, {HELD_BODIES} times "
                f"serve.max_body_bytes={self._max_body_bytes}; try again later",
                "too_many_bodies",
                RETRY_AFTER,
            )


def require_json(request: Request) -> None:
    """Raises HTTPError 415 unless the request says that it sends JSON. A browser sends a preflight
    before it sends JSON for a page of another site, and only `serve.cors_origins` allows one."""
    sent = request.headers.getlist("content-type")
    if len(sent) > 1:
        raise HTTPError(
            415,
            f"the header content-type appears {len(sent)} times; send it once, "
            "as 'application/json'",
        )
    kind = "".join(sent).partition(";")[0].strip().lower()
    if kind != "application/json":
        raise HTTPError(
            415, f"content-type {shown(kind)} is not supported; send 'application/json'"
        )


async def read_json_parts(
    request: Request, limit_bytes: int, limit_name: str = "serve.max_body_bytes="
) -> AsyncGenerator[bytes]:
    """Yields the body of a JSON request as it arrives, unpacked. Raises HTTPError before more than
    the limit has arrived or was unpacked, and BadRequest if the body cannot be unpacked."""
    require_json(request)
    decoder = body_decoder(request)
    too_long = HTTPError(
        413, f"the body has more than {limit_name}{limit_bytes} bytes", "request_too_large"
    )
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > limit_bytes):
        raise too_long
    size = came = 0
    async for part in request.stream():
        came += len(part)
        if came > limit_bytes:
            raise too_long
        if decoder is None:
            yield part
            continue
        for piece in decoder.pieces(part):
            size += len(piece)
            if size > limit_bytes:
                raise too_long
            yield piece
            await asyncio.sleep(0)
    if decoder is not None:
        decoder.end()


async def read_short_body(request: Request, limit_bytes: int) -> bytes:
    """Returns the whole body of a JSON request that is always short."""
    parts = read_json_parts(request, limit_bytes, "")
    return b"".join([part async for part in parts])


def warning_of(paths: list[str], what: str = "unknown fields") -> str | None:
    """Returns the text of the header that names the ignored parts. It is visible ASCII and fits
    into a header."""
    if not paths:
        return None
    named = ", ".join(_shortened(ascii(path)[1:-1]) for path in paths[:MAX_WARNED])
    more = f" and {len(paths) - MAX_WARNED} more" if len(paths) > MAX_WARNED else ""
    return f"{what} were ignored: {named}{more}"


def warn_of_keywords(context: RequestContext, paths: Iterable[str]) -> None:
    """Adds the ignored schema keywords to the warning header of the answer."""
    both = (context.warning, warning_of(list(paths), "schema keywords"))
    context.warning = "; ".join(filter(None, both)) or None


def _shortened(path: str) -> str:
    """Returns the beginning and the end of a long path: its last name matters most."""
    if len(path) <= MAX_WARNED_CHARS:
        return path
    half = (MAX_WARNED_CHARS - 3) // 2
    return f"{path[:half]}...{path[-half:]}"
