"""API keys: they authorize requests, and separate the stored responses of users."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from starlette.requests import Request

from swell.cluster.api.bodies.http_errors import HTTPError
from swell.configs.files.bounded_files import open_regular
from swell.configs.runtime.log import StructuredLogger
from swell.configs.runtime.secret import SecretBytes, SecretText
from swell.configs.schema import ConfigError, ServeConfig

_FILES = ("api_keys_file", "admin_keys_file")
_LOG = StructuredLogger("cluster.api_keys")
MAX_FILE_BYTES = 1024 * 1024
_LINE = re.compile(rb"[ \t]*(?:([!-\"$-~]+)[ \t]*|([!-\"$-~]+)[ \t]+#.*|#.*)?")
"""An empty line, a key, a key and a comment, or a comment. A key is visible ASCII without `#`, so
that a header can carry it."""


class ApiKeys:
    """The keys of a file, one per line; `#` after a space starts a comment. Without a file no key
    is needed."""

    def __init__(self, path: str | None, setting: str) -> None:
        self._hashes: list[SecretBytes] | None = None
        if path is None:
            return
        try:
            with os.fdopen(open_regular(Path(path)), "rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{setting}={path!r} cannot be read: {error.strerror}") from None
        if mode & stat.S_IWOTH:
            raise ConfigError(
                f"{setting}={path!r} has the mode {stat.S_IMODE(mode):o}: every account may add "
                "a key; chmod 600 it"
            )
        if (text := _read_by_others(setting, path, mode)) is not None:
            _LOG.warning(text)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(
                f"{setting}={path!r} has more than {MAX_FILE_BYTES} bytes; shorten it"
            )
        self._hashes = []
        for number, line in enumerate(content.splitlines(), 1):
            found = _LINE.fullmatch(line)
            if found is None:  # the error must not show the key
                raise ConfigError(
                    f"{setting}={path!r}, line {number}: a key must be visible ASCII without "
                    "spaces and '#', one key per line; put a space before a comment"
                )
            if key := found[1] or found[2]:
                self._hashes.append(hashlib.sha256(key).digest())
        if not self._hashes:
            raise ConfigError(f"{setting}={path!r} contains no key")

    def check(self, request: Request) -> SecretText:
        """Returns a name for the key of the request that does not reveal the key; empty if no keys
        are configured. Raises HTTPError 401 unless the key is one of them."""
        if self._hashes is None:
            return ""
        _check_single(request)
        for key in _presented_keys(request):
            shown = hashlib.sha256(key.encode())
            known = [hmac.compare_digest(shown.digest(), one) for one in self._hashes]
            if any(known):  # all are compared, so that the time reveals nothing about them
                return shown.hexdigest()
        raise HTTPError(
            401,
            "send a valid key: 'Authorization: Bearer KEY', or 'x-api-key: KEY'",
            "invalid_api_key",
        )


def key_file_warnings(config: ServeConfig) -> list[str]:
    """Returns a warning for each key file that every account of this host may read."""
    found = []
    for name in _FILES:
        if (path := getattr(config, name)) is not None:
            with contextlib.suppress(OSError):  # it is missing here, or cannot be read either
                found.append(_read_by_others(f"serve.{name}", path, os.stat(path).st_mode))
    return [text for text in found if text is not None]


def _read_by_others(setting: str, path: str, mode: int) -> str | None:
    if not mode & stat.S_IROTH:
        return None
    return (
        f"{setting}={path!r} has the mode {stat.S_IMODE(mode):o}: every account of the host may "
        "read the keys; chmod 600 it"
    )


def _check_single(request: Request) -> None:
    """Raises HTTPError if a header with a key occurs twice: a proxy on the way may check the other
    one."""
    for name in ("authorization", "x-api-key"):
        count = len(request.headers.getlist(name))
        if count > 1:
            raise HTTPError(400, f"the header {name} appears {count} times; send it once")


def _presented_keys(request: Request) -> Iterator[SecretText]:
    """Yields the keys of a request. OpenAI's clients send `authorization`, Anthropic's send
    `x-api-key` or both."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield key.strip()
    if "x-api-key" in request.headers:
        yield request.headers["x-api-key"].strip()
