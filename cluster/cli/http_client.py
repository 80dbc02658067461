"""A small HTTP/1.1 client for our own API: JSON calls and event streams.

It exists because `swell bench` shares the cores with the server that it measures: this one needs
a fraction of a general client's work for each event. One connection serves one request.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import msgspec

T = TypeVar("T")

_CONNECT_S = 10.0
_DONE = b"[DONE]"


class ServerError(RuntimeError):
    """A server that refuses, fails, or is not there; `status` is None without an HTTP answer."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Response:
    """An HTTP answer whose head has been read."""

    def __init__(self, reader: asyncio.StreamReader, status: int, headers: dict[str, str]) -> None:
        self._reader = reader
        self.status = status
        self.headers = headers

    async def body(self) -> AsyncIterator[bytes]:
        """The body in the pieces in which it was sent. Raises IncompleteReadError."""
        reader, headers = self._reader, self.headers
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while size := _chunk_size(await reader.readline()):
                yield await reader.readexactly(size)
                await reader.readexactly(2)
        elif "content-length" in headers:
            yield await reader.readexactly(int(headers["content-length"]))
        else:
            while piece := await reader.read(65536):
                yield piece

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.body()])

    async def events(self) -> AsyncIterator[bytes]:
        """The data of each event. Raises ServerError for an error event or a missing end."""
        rest = b""
        async for piece in self.body():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == _DONE:
                    return
                if data.startswith(b'{"error"'):
                    raise ServerError(error_message(data))
                yield data
        raise ServerError("the stream ended before its [DONE]")


class Client:
    """Speaks to one server. Every failure is a ServerError in one line."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self.url = normal_url(url)
        self._parts: SplitResult = urlsplit(self.url)
        self._timeout_s = timeout_s
        lines = [f"Host: {self._parts.netloc}", "Connection: close", "Accept: */*"]
        if api_key:
            if not api_key.isascii() or not api_key.isprintable():
                raise ServerError("the API key holds characters that no HTTP header can carry")
            lines.append(f"Authorization: Bearer {api_key}")
        self._headers = "\r\n".join(lines)

    async def get(self, path: str, kind: type[T]) -> T:
        return await self._call("GET", path, None, kind)

    async def post(self, path: str, body: Any, kind: type[T]) -> T:
        return await self._call("POST", path, msgspec.json.encode(body), kind)

    @contextlib.asynccontextmanager
    async def open(
        self, method: str, path: str, body: bytes | None = None
    ) -> AsyncIterator[Response]:
        """A response with a status below 400, closed at the end. `body` is JSON."""
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await self._connect()
                try:
                    writer.write(self._request(method, path, body))
                    response = await _read_head(reader)
                    if response.status >= 400:
                        message = error_message(await response.read())
                        raise ServerError(f"{response.status}: {message}", response.status)
                    yield response
                finally:
                    writer.close()
        except TimeoutError:
            raise ServerError(
                f"{method} {path}: no complete answer after {self._timeout_s:g} s"
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ServerError(f"{method} {path}: the server closed the connection") from None
        except asyncio.LimitOverrunError:
            raise ServerError("the head of the answer is too long to be HTTP") from None

    async def _call(self, method: str, path: str, body: bytes | None, kind: type[T]) -> T:
        async with self.open(method, path, body) as response:
            content = await response.read()
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError as error:
            raise ServerError(
                f"{self.url}{path} does not answer as Swell does: {error}; is the URL right?"
            ) from None

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        secure = self._parts.scheme == "https"
        port = self._parts.port or (443 if secure else 80)
        try:
            async with asyncio.timeout(_CONNECT_S):
                return await asyncio.open_connection(
                    self._parts.hostname, port, ssl=ssl.create_default_context() if secure else None
                )
        except TimeoutError:
            reason = f"no connection after {_CONNECT_S:g} s"
        except ConnectionRefusedError:
            reason = "connection refused; is it running? ('swell serve' prints its URL)"
        except OSError as error:
            reason = error.strerror or str(error)
        raise ServerError(f"cannot reach {self.url}: {reason}")

    def _request(self, method: str, path: str, body: bytes | None) -> bytes:
        head = f"{method} {self._parts.path}{path} HTTP/1.1\r\n{self._headers}\r\n"
        if body is None:
            return f"{head}\r\n".encode()
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return f"{head}{kind}".encode() + body


async def _read_head(reader: asyncio.StreamReader) -> Response:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    protocol, _, status = first.partition(" ")
    if not protocol.startswith("HTTP/1.") or not status[:3].isdigit():
        raise ServerError(f"the answer is not HTTP: it begins with {first[:40]!r}")
    pairs = (line.partition(":") for line in lines if line)
    return Response(reader, int(status[:3]), {k.strip().lower(): v.strip() for k, _, v in pairs})


def _chunk_size(line: bytes) -> int:
    """Of a chunk's first line, `HEX[;extension]`. Raises ServerError."""
    try:
        return int(line.split(b";")[0], 16)
    except ValueError:
        raise ServerError("the server closed the connection in the middle of its answer") from None


def error_message(body: bytes) -> str:
    """The message of OpenAI's error body, or the start of whatever came instead."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, LookupError, TypeError):
        return " ".join(body[:200].decode(errors="replace").split()) or "no explanation"


def normal_url(url: str) -> str:
    """`host:port` and `http://host:port/` are the same. Raises ServerError."""
    full = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        parts = urlsplit(full)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or not full.isascii() or not full.isprintable() or " " in full:
        raise ServerError(f"{url!r} is no URL; it looks like http://127.0.0.1:8000")
    return full
