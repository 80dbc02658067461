"""Decompresses request bodies (`Content-Encoding: gzip` or `deflate`) as they arrive.

A few bytes may decompress to a thousand times as many. Therefore a part is decompressed piece by
piece, only as far as its reader reads. A reader that stops at a limit has decompressed at most one
more piece.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

from starlette.requests import Request

from swell.cluster.api.bodies.http_errors import HTTPError
from swell.cluster.text.errors import BadRequest
from swell.configs.error_text import shown

DECODED_CHUNK_BYTES = 64 * 1024
"""The size of a piece, which decompresses in some 0.1 ms; the event loop gets its turn between two
pieces."""
MAX_MEMBERS = 1024
"""The most members of a gzip body: a member of 20 bytes decompresses to nothing, but costs at least
a microsecond. The members of `bgzip` files have 64 KiB each."""
_ACCEPTED = "gzip, deflate"
_NAMES = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}
_GZIP, _ZLIB, _RAW = 31, 15, -15
"""The `wbits` parameter of zlib for each format."""


class ZlibDecoder:
    """Decompresses one body. `deflate` means the zlib format (RFC 9110, 8.4.1.2). Some clients send
    raw deflate data without the zlib header and checksum, which is recognized by the missing
    header."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._inflate = zlib.decompressobj(_GZIP) if name == "gzip" else None
        self._head = b""
        self._members = 1

    def pieces(self, part: bytes) -> Iterator[bytes]:
        """Yields the decompressed content of a part of the body. Raises BadRequest if it is
        damaged."""
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
        """Returns the decompressor for `part`. Another gzip member may follow the first (RFC 1952,
        2.2)."""
        if not inflate.eof or not part:
            return inflate
        if self._name != "gzip":
            raise self._damaged("has extra bytes after its end")
        self._members += 1
        if self._members > MAX_MEMBERS:
            raise self._damaged(f"has more than {MAX_MEMBERS} members")
        return zlib.decompressobj(_GZIP)

    def end(self) -> None:
        """Ends the body. Raises BadRequest if data is missing."""
        if self._inflate is None or not self._inflate.eof:
            raise self._damaged("is truncated")

    def _damaged(self, what: str) -> BadRequest:
        return BadRequest(
            f"the body, with content-encoding {self._name!r}, {what}", code="invalid_encoding"
        )


def _is_zlib(head: bytes) -> bool:
    """Returns whether the data begins with a zlib header (RFC 1950, 2.2)."""
    return head[0] & 0x0F == 8 and (head[0] << 8 | head[1]) % 31 == 0


def body_decoder(request: Request) -> ZlibDecoder | None:
    """Returns the decompressor of this request's body; None: it is not compressed. Raises HTTPError
    415."""
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
