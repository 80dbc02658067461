"""What every response body is made of. Fields that are UNSET stay out of the JSON."""

from __future__ import annotations

import msgspec

from swell.cluster.text.sampling_params import BadRequest


class Body(msgspec.Struct, kw_only=True):
    """Base of every response."""


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


def error_body(
    error: BadRequest | str,
    *,
    type: str = "invalid_request_error",
    param: str | None = None,
    code: str | None = None,
) -> bytes:
    """OpenAI's error body as JSON. A `BadRequest` brings its own `param` and `code`."""
    if isinstance(error, BadRequest):
        detail = ErrorDetail(message=error.message, type=type, param=error.param, code=error.code)
    else:
        detail = ErrorDetail(message=error, type=type, param=param, code=code)
    return msgspec.json.encode(ErrorBody(error=detail))
