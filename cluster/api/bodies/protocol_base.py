"""Base types of response bodies. Fields that are UNSET are left out of the JSON."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class Body(msgspec.Struct, kw_only=True):
    """Base class of every response body."""


def encode_line(body: object) -> bytes:
    """Encodes JSON in one line. Escapes U+0085, U+2028 and U+2029 too: JSON allows them in strings,
    but readers based on Python's `str.splitlines` split there."""
    line = msgspec.json.encode(body)
    if line.isascii():
        return line
    for char, escaped in _LINE_ENDS.items():
        line = line.replace(char, escaped)
    return line


_LINE_ENDS = {char.encode(): b"\\u%04x" % ord(char) for char in "\x85\u2028\u2029"}
"""The line ends that JSON does not escape (it escapes control characters): UTF-8 -> their JSON
escapes."""


def named_event(event: msgspec.Struct) -> bytes:
    """Encodes a tagged body as a server-sent event whose `event:` line is its tag."""
    name = str(event.__struct_config__.tag).encode()
    return b"event: %b\ndata: %b\n\n" % (name, encode_line(event))


class PromptTokensDetails(Body, kw_only=True):
    cached_tokens: int = 0


class CompletionTokensDetails(Body, kw_only=True):
    reasoning_tokens: int
    """Number of tokens of the reasoning's text, tokenized again."""


class Usage(Body, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Present in chat answers. In a chunk with `continuous_usage_stats` each piece of text is
    counted by itself."""


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
