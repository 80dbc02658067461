"""Commands of `curl` as requests."""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from urllib.parse import urlsplit


class Request(NamedTuple):
    """`method` is in lower case, as OpenAPI writes it."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


def request_of(arguments: list[str]) -> Request:
    """Returns the request that `curl` with these arguments sends. Raises ValueError for an option
    that no page uses, and for a body that is not JSON."""
    method, url, headers, body = None, None, {}, None
    words = iter(arguments)
    for word in words:
        if word == "-X":
            method = next(words).lower()
        elif word == "-H":
            name, _, value = next(words).partition(":")
            headers[name.strip().lower()] = value.strip()
        elif word == "-d":
            body = json.loads(next(words))
        elif word.startswith("http"):
            url = urlsplit(word)
        elif word != "-N":
            raise ValueError(f"curl {word}: an option that no page uses")
    if url is None:
        raise ValueError("curl without a URL")
    return Request(method or ("get" if body is None else "post"), url.path, headers, body)
