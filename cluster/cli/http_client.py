"""Client of Swell's own API: JSON calls and event streams. Every failure is one line for people."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import AsyncIterator
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from swell.configs.runtime.secret import SecretText

T = TypeVar("T")

_CONNECT_S = 10.0
_DONE = b"[DONE]"


class ServerError(RuntimeError):
    """Raised if a server refuses, fails or cannot be reached. `status` is None without an HTTP
    response."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Calls one server, with a new connection for each request. Every failure is a ServerError."""

    def __init__(
        self, url: str, api_key: SecretText | None = None, timeout_s: float = 600.0
    ) -> None:
        self.url = normal_url(url)
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            if not api_key.isascii() or not api_key.isprintable():
                raise ServerError(
                    "the API key contains characters that an HTTP header cannot contain"
                )
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def get(self, path: str, kind: type[T]) -> T:
        return await self._call("GET", path, None, kind)

    async def post(self, path: str, body: object, kind: type[T]) -> T:
        return await self._call("POST", path, msgspec.json.encode(body), kind)

    @contextlib.asynccontextmanager
    async def open(
        self, method: str, path: str, body: bytes | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Opens a response with a status below 400, for the duration of the context. `body` is
        JSON."""
        timeout = aiohttp.ClientTimeout(self._timeout_s, connect=_CONNECT_S)
        url, headers = self.url + path, self._headers
        try:
            async with aiohttp.request(
                method, url, data=body, headers=headers, timeout=timeout
            ) as response:
                if response.status >= 400:
                    message = error_message(await response.read())
                    raise ServerError(f"{response.status}: {message}", response.status)
                yield response
        except aiohttp.ClientConnectorError as error:
            reason = error.strerror or str(error)
            if error.errno == errno.ECONNREFUSED:
                reason = "connection refused; is it running? ('swell serve' prints its URL)"
            raise ServerError(f"cannot reach {self.url}: {reason}") from None
        except aiohttp.ConnectionTimeoutError:
            raise ServerError(
                f"cannot reach {self.url}: no connection after {_CONNECT_S:g} s"
            ) from None
        except TimeoutError:
            raise ServerError(
                f"{method} {path}: no complete answer after {self._timeout_s:g} s"
            ) from None
        except aiohttp.ClientResponseError as error:
            message = " ".join(error.message.split())
            raise ServerError(f"the response is not HTTP: {message}") from None
        except aiohttp.ClientError:
            raise ServerError(f"{method} {path}: the server closed the connection") from None

    async def _call(self, method: str, path: str, body: bytes | None, kind: type[T]) -> T:
        async with self.open(method, path, body) as response:
            content = await response.read()
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError as error:
            raise ServerError(
                f"{self.url}{path} does not answer like Swell: {error}; check the URL"
            ) from None


async def read_events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields the data of each event. Raises ServerError for an error event, or if the final
    `[DONE]` is missing."""
    rest = b""
    async for piece in response.content.iter_any():
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


def error_message(body: bytes) -> str:
    """Returns the message of an OpenAI error body, or the start of any other body."""
    try:
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, LookupError, TypeError):
        return " ".join(body[:200].decode(errors="replace").split()) or "no error message"


def normal_url(url: str) -> str:
    """Returns the base URL; `host:port` and `http://host:port/` are equal. Raises ServerError."""
    full = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        parts = urlsplit(full)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or not full.isascii() or not full.isprintable() or " " in full:
        raise ServerError(f"{url!r} is not a URL; write it like http://127.0.0.1:8000")
    return full
