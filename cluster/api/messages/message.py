"""Response bodies, stream events and errors of `/v1/messages`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from swell.cluster.api.bodies.protocol_base import Body, Usage
from swell.cluster.api.bodies.timings import Timings

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]

SIGNATURE = "unsigned"
"""The signature of thinking blocks. The API requires one, and clients do not send back a block
without it."""


class TextOutput(Body, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingOutput(Body, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseOutput(Body, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Annotated[Any, Meta(extra_json_schema={"type": "object"})]
    """An object. If it contains a number that does not fit a double, it is kept as JSON text."""


OutputBlock = TextOutput | ThinkingOutput | ToolUseOutput


class MessageUsage(Body, kw_only=True):
    """The usage of an answer. The number of prompt tokens is the sum of the three input fields."""

    input_tokens: int
    """The prompt tokens that were computed."""
    cache_creation_input_tokens: int = 0
    """Always 0: every computed block is cached for free."""
    cache_read_input_tokens: int = 0
    output_tokens: int


def message_usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )


class Message(Body, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    """None only in `message_start`."""
    stop_sequence: str | None
    """The text that ended the answer, if `stop_reason` is `stop_sequence`."""
    usage: MessageUsage
    timings: Timings | UnsetType = UNSET


class TokenCount(Body, kw_only=True):
    input_tokens: int


class Event(Body, kw_only=True, tag_field="type"):
    """Base class of the events of a stream."""


class MessageStart(Event, kw_only=True, tag="message_start"):
    """The message, still empty."""

    message: Message


class BlockStart(Event, kw_only=True, tag="content_block_start"):
    """Block `index` of the message begins, still empty."""

    index: int
    content_block: OutputBlock


class TextDelta(Body, kw_only=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(Body, kw_only=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(Body, kw_only=True, tag_field="type", tag="signature_delta"):
    """The last delta of a thinking block."""

    signature: str


class InputDelta(Body, kw_only=True, tag_field="type", tag="input_json_delta"):
    """More JSON text of the input of a call."""

    partial_json: str


class BlockDelta(Event, kw_only=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Event, kw_only=True, tag="content_block_stop"):
    index: int


class Ending(Body, kw_only=True):
    stop_reason: StopReason | None
    stop_sequence: str | None = None


class MessageDelta(Event, kw_only=True, tag="message_delta"):
    """Reports how the message ended. `usage` covers the whole message."""

    delta: Ending
    usage: MessageUsage
    timings: Timings | UnsetType = UNSET


class MessageStop(Event, kw_only=True, tag="message_stop"):
    pass


class Ping(Event, kw_only=True, tag="ping"):
    """Sent while a stream waits, also before `message_start`. Clients skip it."""


class MessagesErrorDetail(Body, kw_only=True):
    type: str
    message: str


class MessagesError(Event, kw_only=True, tag="error"):
    """The body of a failed answer, and the last event of a failed stream."""

    error: MessagesErrorDetail
    request_id: str | None = None


StreamEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping

OVERLOADED = 529
"""A status that only this API has: no engine can answer, try again. Anthropic's clients retry it
like other 5xx, and have a name for it."""

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


def messages_status(status: int) -> int:
    """Returns the status that this API uses for an HTTP status."""
    return OVERLOADED if status == 503 else status


def messages_error(message: str, status: int, request_id: str) -> MessagesError:
    kind = _KINDS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return MessagesError(
        error=MessagesErrorDetail(type=kind, message=message), request_id=request_id
    )
