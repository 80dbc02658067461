"""API keys: they authorize requests, and separate the stored responses of users."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from pathlib import Path

from starlette.requests import Request

from swell.cluster.api.http_errors import HTTPError
from swell.configs.schema import ConfigError


class ApiKeys:
    """Keys of a file, one a line, `#` starts a comment. Without a file no key is needed."""

    def __init__(self, path: str | None, setting: str) -> None:
        self._hashes: list[bytes] | None = None
        if path is None:
            return
        try:
            lines = Path(path).read_text().splitlines()
        except OSError as error:
            raise ConfigError(f"{setting}={path!r} cannot be read: {error.strerror}") from None
        keys = [line.split("#")[0].strip() for line in lines]
        self._hashes = [hashlib.sha256(key.encode()).digest() for key in keys if key]
        if not self._hashes:
            raise ConfigError(f"{setting}={path!r} holds no key")

    def check(self, request: Request) -> str:
        """A name for the key of the request, which does not reveal it; empty without configured
        keys. Raises HTTPError 401 unless it is one of them."""
        if self._hashes is None:
            return ""
        for key in _presented_keys(request):
            shown = hashlib.sha256(key.encode())
            known = [hmac.compare_digest(shown.digest(), one) for one in self._hashes]
            if any(known):  # all are compared, so that the time reveals nothing of them
                return shown.hexdigest()
        raise HTTPError(
            401,
            "send a valid key: 'Authorization: Bearer KEY', or 'x-api-key: KEY'",
            "invalid_api_key",
        )


def _presented_keys(request: Request) -> Iterator[str]:
    """OpenAI's clients send `authorization`, Anthropic's `x-api-key` or both."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield key.strip()
    if "x-api-key" in request.headers:
        yield request.headers["x-api-key"].strip()
