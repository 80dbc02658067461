"""Request bodies that come packed: `Content-Encoding: gzip` or `deflate`, unpacked as they come.

A few bytes may unpack to a thousand times as many. So a part is unpacked piece by piece, and only
as far as its reader reads: a reader that stops at a limit has unpacked one piece more at most.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request

from swell.cluster.api.http_errors import HTTPError
from swell.cluster.text.sampling_params import BadRequest, shown

DECODED_CHUNK_BYTES = 64 * 1024
"""Unpacked in some 0.1 ms; the event loop has its turn between two of them."""
MAX_MEMBERS = 1024
"""Members of a gzip body: one of 20 bytes decompresses to nothing, and takes a microsecond at
least. Those of `bgzip` have 64 KiB each."""
_ACCEPTED = "gzip, deflate"
_NAMES = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
_GZIP, _ZLIB, _RAW = 31, 15, -15
"""The `wbits` of zlib."""


class ZlibDecoder:
    """`deflate` means zlib's format (RFC 9110, 8.4.1.2); clients that leave its head and its sum
    out are understood by the head that is missing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._inflate = zlib.decompressobj(_GZIP) if name == "gzip" else None
        self._head = b""
        self._members = 1

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """What a part of the body holds. Raises BadRequest where it is damaged."""
        if self._inflate is None:
            part = self._head = self._head + part
            if len(part) < 2:
                return
            self._inflate = zlib.decompressobj(_ZLIB if _is_zlib(part) else _RAW)
        while True:
            inflate = self._inflate = self._next(self._inflate, part)
            try:
                piece = inflate.decompress(part, DECODED_CHUNK_BYTES)
            except zlib.error as error:
                raise self._damaged(f"is not valid: {error}") from None
            if piece:
                yield piece
            part = inflate.unused_data if inflate.eof else inflate.unconsumed_tail
            if not part and (inflate.eof or len(piece) < DECODED_CHUNK_BYTES):
                return

    def _next(self, inflate: Any, part: bytes) -> Any:
        """What reads `part`. Behind a member of gzip there may be another (RFC 1952, 2.2)."""
        if not inflate.eof or not part:
            return inflate
        if self._name != "gzip":
            raise self._damaged("has more bytes behind its end")
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise self._damaged(f"has more than {MAX_MEMBERS} members")
        return zlib.decompressobj(_GZIP)

    def end(self) -> None:
        """Nothing follows. Raises BadRequest where something is missing."""
        if self._inflate is None or not self._inflate.eof:
            raise self._damaged("ends too early")

    def _damaged(self, what: str) -> BadRequest:
        return BadRequest(
            f"the body, with content-encoding {self._name!r}, {what}", code="invalid_encoding"
        )


def _is_zlib(head: bytes) -> bool:
    """RFC 1950, 2.2."""
    return head[0] & 0x0F == 8 and (head[0] << 8 | head[1]) % 31 == 0


def body_decoder(request: Request) -> ZlibDecoder | None:
    """What unpacks the body of this request; None: it is not packed. Raises HTTPError 415."""
    sent = ",".join(request.headers.getlist("content-encoding"))
    names = [name.strip().lower() for name in sent.split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if not names:
        return None
    if len(names) > 1 or names[0] not in _NAMES:
        raise HTTPError(
            415,
            f"content-encoding {shown(', '.join(names))} is not supported; send one of "
            f"{_ACCEPTED}, or a body without an encoding",
            headers={"accept-encoding": _ACCEPTED},
        )
    return ZlibDecoder(_NAMES[names[0]])
