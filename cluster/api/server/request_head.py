"""Refuses request heads that the parser accepts but HTTP/1.1 (RFC 9112) forbids. A proxy on the way
may read them differently, and see another host, another path, or another end of the body."""

from __future__ import annotations

import re
from collections.abc import Sequence

from swell.cluster.api.bodies.http_errors import HTTPError
from swell.configs.error_text import shown

_CODE = "invalid_head"
_ABSOLUTE = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)
"""A request target with a host name (absolute form), as sent to a proxy."""

Headers = Sequence[tuple[bytes, bytes]]


def head_refusal(method: bytes, target: bytes, version: str, headers: Headers) -> HTTPError | None:
    """Returns the reason for which a request with this head is refused; None: it is accepted. Names
    of headers must be lower case."""
    if version not in ("1.0", "1.1"):
        return HTTPError(505, f"HTTP/{version} is not supported; send HTTP/1.1", _CODE)
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        return HTTPError(400, f"the header host appears {len(hosts)} times; send it once", _CODE)
    return _target_refusal(method, target, hosts) or _framing_refusal(version, headers)


def _target_refusal(method: bytes, target: bytes, hosts: list[bytes]) -> HTTPError | None:
    text = shown(target.decode("latin-1"))
    if b"#" in target:
        return HTTPError(400, f"the target {text} must not have a fragment ('#')", _CODE)
    if target.startswith(b"/") or (target, method) == (b"*", b"OPTIONS"):
        return None
    named = _ABSOLUTE.match(target)
    if named is None:
        return HTTPError(400, f"the target {text} must be a path that begins with '/'", _CODE)
    if [named[1].lower()] != [host.strip().lower() for host in hosts]:
        return HTTPError(400, f"the target {text} names another host than the header host", _CODE)
    return None


def _framing_refusal(version: str, headers: Headers) -> HTTPError | None:
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if not codings:
        return None
    if version == "1.0":
        return HTTPError(
            400, "HTTP/1.0 does not support transfer-encoding; send content-length", _CODE
        )
    if codings != [b"chunked"]:
        coding = shown(b", ".join(codings).decode("latin-1"))
        return HTTPError(501, f"transfer-encoding {coding} is not supported; send 'chunked'", _CODE)
    return None
