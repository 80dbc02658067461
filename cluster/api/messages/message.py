"""`/v1/messages`: what a client gets, whole or as events."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from swell.cluster.api.protocol_base import Body, Usage

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]

SIGNATURE = "unsigned"
"""Of thinking blocks. The API wants one, and clients send no block back that has none."""


class TextOutput(Body, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingOutput(Body, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseOutput(Body, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


OutputBlock = TextOutput | ThinkingOutput | ToolUseOutput


class MessageUsage(Body, kw_only=True):
    """The prompt's tokens are the sum of the three numbers of input."""

    input_tokens: int
    """Those that were computed."""
    cache_creation_input_tokens: int = 0
    """Always 0: every computed block is kept, and nobody pays for it."""
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
    """None in `message_start` alone."""
    stop_sequence: str | None
    """The text that ended the answer, with `stop_sequence`."""
    usage: MessageUsage


class TokenCount(Body, kw_only=True):
    input_tokens: int


class Event(Body, kw_only=True, tag_field="type"):
    """Base of the events of a stream."""

    def encoded(self) -> bytes:
        """As a server-sent event, which this API also names in a line of its own."""
        name = str(self.__struct_config__.tag).encode()
        return b"event: %b\ndata: %b\n\n" % (name, msgspec.json.encode(self))


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
    """The last of a thinking block."""

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
    """How the message ended; `usage` is that of all of it."""

    delta: Ending
    usage: MessageUsage


class MessageStop(Event, kw_only=True, tag="message_stop"):
    pass


class MessagesErrorDetail(Body, kw_only=True):
    type: str
    message: str


class MessagesError(Event, kw_only=True, tag="error"):
    """The body of an answer that failed, and the last event of a stream that did."""

    error: MessagesErrorDetail
    request_id: str | None = None


StreamEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
