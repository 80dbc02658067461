"""What every response body is made of. Fields that are UNSET stay out of the JSON."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class Body(msgspec.Struct, kw_only=True):
    """Base of every response."""


def encode_line(body: object) -> bytes:
    """JSON in one line, whatever ends a line: U+0085, U+2028 and U+2029, which JSON allows in
    strings and readers made from Python's `str.splitlines` split at, are escaped too."""
    line = msgspec.json.encode(body)
    if line.isascii():
        return line
    for char, escaped in _LINE_ENDS.items():
        line = line.replace(char, escaped)
    return line


_LINE_ENDS = {char.encode(): b"\\u%04x" % ord(char) for char in "\x85\u2028\u2029"}
"""Of those beside control characters, which JSON escapes: UTF-8 -> as JSON may write them."""


def named_event(event: msgspec.Struct) -> bytes:
    """A tagged body as a server-sent event, which its tag names in a line of its own."""
    name = str(event.__struct_config__.tag).encode()
    return b"event: %b\ndata: %b\n\n" % (name, encode_line(event))


class PromptTokensDetails(Body, kw_only=True):
    cached_tokens: int = 0


class CompletionTokensDetails(Body, kw_only=True):
    reasoning_tokens: int
    """Those of the text of the reasoning, counted anew."""


class Usage(Body, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Of chat answers; not of each chunk with `continuous_usage_stats`."""


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> Usage:
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
    )


class ErrorDetail(Body, kw_only=True):
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None


class ErrorBody(Body, kw_only=True):
    error: ErrorDetail
