"""What every response body is made of. Fields that are UNSET stay out of the JSON."""

from __future__ import annotations

import msgspec


class Body(msgspec.Struct, kw_only=True):
    """Base of every response."""


def named_event(event: msgspec.Struct) -> bytes:
    """A tagged body as a server-sent event, which its tag names in a line of its own."""
    name = str(event.__struct_config__.tag).encode()
    return b"event: %b\ndata: %b\n\n" % (name, msgspec.json.encode(event))


class PromptTokensDetails(Body, kw_only=True):
    cached_tokens: int = 0


class Usage(Body, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


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
