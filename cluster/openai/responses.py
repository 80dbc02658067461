"""What the API answers. Fields that are UNSET stay out of the JSON.

`stop_reason`, `token_ids` and `prompt_token_ids` are not OpenAI's: the stop string or stop token
that ended an answer, and the ids that `return_token_ids` asked for.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from swell.cluster.params import BadRequest


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


class CompletionChoice(Body, kw_only=True):
    index: int
    text: str
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Body, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunkChoice(Body, kw_only=True):
    index: int
    text: str
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class CompletionChunk(Body, kw_only=True):
    """One event of a completion stream. `usage` is null in all but the last event of a stream
    that asked for it, and absent from one that did not."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ChatResponseMessage(Body, kw_only=True):
    role: str = "assistant"
    content: str | None = None
    refusal: str | None = None


class ChatChoice(Body, kw_only=True):
    index: int
    message: ChatResponseMessage
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Body, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatDelta(Body, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Body, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Body, kw_only=True):
    """One event of a chat stream; `usage` as in `CompletionChunk`."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(Body, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "swell"
    max_model_len: int


class ModelList(Body, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class TokenizeResponse(Body, kw_only=True):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeResponse(Body, kw_only=True):
    prompt: str


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
