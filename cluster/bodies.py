"""Bodies of requests: read up to their limits, then decoded and checked off the event loop."""

from __future__ import annotations

from contextlib import aclosing
from typing import TypeVar

from starlette.requests import Request

from swell.cluster.http import HTTPError, read_json_parts
from swell.cluster.offload import Offload
from swell.cluster.openai.base import RequestBody
from swell.cluster.openai.decode import decode

Body = TypeVar("Body", bound=RequestBody)

HELD_BODIES = 16
"""So many bodies of the largest size may be held at once, by all requests together. Beyond that
a client that sends more than an equal share is refused: a few that hold much, and send slowly,
keep out no other client. All together never hold twice as much."""
_RETRY = {"retry-after": "1"}


class BodyReader:
    """Reads the bodies of one ingress. Bytes count from their arrival until they are decoded."""

    def __init__(self, max_body_bytes: int, offload: Offload) -> None:
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max_body_bytes * HELD_BODIES
        self._offload = offload
        self.held_bytes = 0
        self._readers = 0

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """The checked body of somebody who may ask. Raises BadRequest and HTTPError."""
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
            request.state.body_bytes = size
            return await self._offload.run_sized(size, _decoded, parts, kind)
        finally:
            self._readers -= 1
            self.held_bytes -= size

    def _check_room(self, size: int) -> None:
        """Of a reader that holds so much."""
        is_share = size * self._readers <= self._max_held_bytes
        if self.held_bytes > self._max_held_bytes and not is_share:
            raise HTTPError(
                503,
                f"the bodies that are being read fill {HELD_BODIES} times "
                f"serve.max_body_bytes={self._max_body_bytes}; try again later",
                "too_many_bodies",
                "server_error",
                _RETRY,
            )


def body_bytes(request: Request) -> int:
    """The size of the body that was read: how much work it makes."""
    return int(getattr(request.state, "body_bytes", 0))


def _decoded(parts: list[bytes], kind: type[Body]) -> Body:
    return decode(b"".join(parts), kind)
