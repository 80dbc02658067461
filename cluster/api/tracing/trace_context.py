"""Reads the caller's trace from the headers of a request (W3C Trace Context, level 1). Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from starlette.requests import Request

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?",
    re.ASCII,
)
_HEADERS = ("traceparent", "tracestate")
_SAMPLED = 1
_MAX_STATE_CHARS = 512
"""The longest `tracestate` that is passed on."""


class TraceContext(NamedTuple):
    """The caller's span."""

    trace_id: bytes
    span_id: bytes
    sampled: bool
    state: str = ""
    """The header `tracestate`, unchanged."""


def trace_headers(request: Request) -> dict[str, str]:
    return {name: request.headers[name] for name in _HEADERS if name in request.headers}


def trace_context(headers: Mapping[str, str]) -> TraceContext | None:
    """Returns the caller's span; None: `traceparent` is missing or invalid."""
    found = _TRACEPARENT.fullmatch(headers.get("traceparent", ""))
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return None
    trace_id, span_id = bytes.fromhex(found["trace"]), bytes.fromhex(found["span"])
    if not any(trace_id) or not any(span_id):
        return None
    state = headers.get("tracestate", "")
    return TraceContext(
        trace_id,
        span_id,
        bool(int(found["flags"], 16) & _SAMPLED),
        state if len(state) <= _MAX_STATE_CHARS else "",
    )
