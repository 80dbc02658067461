"""Writes the answer of `/v1/messages`.

    message_start │ block 0: start, deltas, stop │ block 1: ... │ message_delta, message_stop

`message_start` contains the number of prompt tokens, so it waits for the first output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from swell.cluster.api.answers.output_parts import PartReader
from swell.cluster.api.answers.response_writer import ResponseWriter, usage_of
from swell.cluster.api.bodies.http_errors import ErrorInfo
from swell.cluster.api.bodies.protocol_base import Usage, named_event
from swell.cluster.api.messages.content import ContentEvents, blocks
from swell.cluster.api.messages.message import (
    Ending,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    OutputBlock,
    ToolUseOutput,
    message_usage,
    messages_error,
)
from swell.cluster.api.messages.protocol import MessagesRequest
from swell.cluster.client.requests.outputs import CompletionOutput, RequestOutput
from swell.cluster.text.parsers.base import Parser


class MessagesResponseWriter(ResponseWriter):
    """Writes messages. `make_parser` makes the parser of the answer; `request_id` is sent with an
    error."""

    def __init__(
        self,
        request_id: str,
        model: str,
        body: MessagesRequest,
        make_parser: Callable[[], Parser],
    ) -> None:
        super().__init__(f"msg_{request_id}", model, include_timings=body.include_timings)
        self._request_id = request_id
        self._max_tokens = body.max_tokens
        self._hides_thinking = body.thinking is not None and body.thinking.display == "omitted"
        self._reader = PartReader(make_parser())
        self._content = ContentEvents(hides_thinking=self._hides_thinking)
        self._ending: Ending | None = None
        """How the stream ends, as far as known; None: the stream has not begun."""

    def full_response(self, outputs: list[RequestOutput], usage: Usage) -> msgspec.Struct:
        (output,) = outputs
        (part,) = output.outputs
        content = blocks(self._reader.read(part), hides_thinking=self._hides_thinking)
        called = any(isinstance(block, ToolUseOutput) for block in content)
        message = self._message(content, self._ended(part, called=called), usage)
        message.timings = self.timings()
        return message

    def _message(self, content: list[OutputBlock], ending: Ending, usage: Usage) -> Message:
        return Message(
            id=self.id,
            model=self.model,
            content=content,
            stop_reason=ending.stop_reason,
            stop_sequence=ending.stop_sequence,
            usage=message_usage(usage),
        )

    def _ended(self, part: CompletionOutput, *, called: bool) -> Ending:
        """Returns why a finished answer ended."""
        if part.finish_reason == "length":
            if part.num_output_tokens < self._max_tokens:
                return Ending(stop_reason="model_context_window_exceeded")
            return Ending(stop_reason="max_tokens")
        if isinstance(part.stop_reason, str):
            return Ending(stop_reason="stop_sequence", stop_sequence=part.stop_reason)
        return Ending(stop_reason="tool_use" if called else "end_turn")

    # ---------------------------------------------------------------- as a stream

    def delta(self, choice: int, output: RequestOutput, part: CompletionOutput) -> Iterator[bytes]:
        if self._ending is None:
            self._ending = Ending(stop_reason=None)
            usage = usage_of([output], part.num_output_tokens)
            yield named_event(MessageStart(message=self._message([], self._ending, usage)))
        for one in self._reader.read(part):
            for event in self._content.push(one):
                yield named_event(event)
        if part.finish_reason is not None:
            self._ending = self._ended(part, called=self._content.called)

    def stream_end(self, usage: Usage) -> Iterable[bytes]:
        assert self._ending is not None, "a stream starts before it finishes"
        for event in self._content.end():
            yield named_event(event)
        usage_of_all, timings = message_usage(usage), self.timings()
        yield named_event(MessageDelta(delta=self._ending, usage=usage_of_all, timings=timings))
        yield named_event(MessageStop())

    def stream_error(self, error: ErrorInfo) -> Iterable[bytes]:
        yield named_event(messages_error(error.message, error.status, self._request_id))
