"""Turns the parts of an answer into content blocks, or into the events that build them.

A block ends when a part of another kind, or the next call, begins.

Anthropic's ids of tool calls are `toolu_` and letters, digits, `_` or `-`; the ids of a model's
format look as its chat template requires (Mistral's are nine letters and digits, Kimi's contain the
function name). Therefore an Anthropic id is the model's id with a prefix, in hexadecimal if it has
other characters. An id that a client sends back reaches the template exactly as the parser returned
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import msgspec

from swell.cluster.api.messages.message import (
    SIGNATURE,
    BlockDelta,
    BlockStart,
    BlockStop,
    Event,
    InputDelta,
    OutputBlock,
    SignatureDelta,
    TextDelta,
    TextOutput,
    ThinkingDelta,
    ThinkingOutput,
    ToolUseOutput,
)
from swell.cluster.text.json_types import JsonObject
from swell.cluster.text.parsers import deltas as parts
from swell.cluster.text.partial_arguments import PartialObject, partial_object_json


def blocks(said: Iterable[parts.AnswerDelta], *, hides_thinking: bool) -> list[OutputBlock]:
    """Returns the content of a whole answer. `hides_thinking` leaves out the text of its
    thinking."""
    content: list[OutputBlock] = []
    call: ToolUseOutput | None = None
    for part in parts.merge(said):
        match part:
            case parts.Content(text):
                content.append(TextOutput(text=text))
            case parts.Reasoning(text):
                shown = "" if hides_thinking else text
                content.append(ThinkingOutput(thinking=shown, signature=SIGNATURE))
            case parts.ToolCall(_, id, name):
                call = ToolUseOutput(id=tool_use_id(id), name=name, input={})
                content.append(call)
            case parts.Arguments(_, text):
                assert call is not None, "a call is announced before its arguments"
                call.input = _input(partial_object_json(text))
    return content


def _input(written: str) -> JsonObject | msgspec.Raw:
    try:
        value: JsonObject = msgspec.json.decode(written)
    except msgspec.DecodeError:  # a number that does not fit a double
        return msgspec.Raw(written.encode())
    return value


class ContentEvents:
    """Yields the events of the same content in a stream. Each block has at least one delta."""

    def __init__(self, *, hides_thinking: bool) -> None:
        self.called = False
        """Whether the answer contains a tool call."""
        self._hides_thinking = hides_thinking
        self._open: OutputBlock | None = None
        """The block that has begun, as it began; None: no block is open."""
        self._index = 0
        self._input = PartialObject()
        self._input_began = False

    def push(self, part: parts.AnswerDelta) -> Iterator[Event]:
        match part:
            case parts.Content(text):
                if not isinstance(self._open, TextOutput):
                    yield from self._begin(TextOutput(text=""))
                yield self._delta(TextDelta(text=text))
            case parts.Reasoning(text):
                if not isinstance(self._open, ThinkingOutput):
                    yield from self._begin(ThinkingOutput(thinking="", signature=""))
                if not self._hides_thinking:
                    yield self._delta(ThinkingDelta(thinking=text))
            case parts.ToolCall(_, id, name):
                self.called = True
                yield from self._begin(ToolUseOutput(id=tool_use_id(id), name=name, input={}))
                self._input, self._input_began = PartialObject(), False
            case parts.Arguments(_, text):
                if given := self._input.push(text):
                    self._input_began = True
                    yield self._delta(InputDelta(partial_json=given))

    def end(self) -> Iterator[Event]:
        """Ends the open block, if any."""
        if self._open is None:
            return
        if isinstance(self._open, ThinkingOutput):
            yield self._delta(SignatureDelta(signature=SIGNATURE))
        elif isinstance(self._open, ToolUseOutput) and not self._input_began:
            yield self._delta(InputDelta(partial_json="{}"))
        yield BlockStop(index=self._index)
        self._open = None
        self._index += 1

    def _begin(self, block: OutputBlock) -> Iterator[Event]:
        yield from self.end()
        self._open = block
        yield BlockStart(index=self._index, content_block=block)

    def _delta(self, delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta) -> Event:
        return BlockDelta(index=self._index, delta=delta)


_PREFIX = "toolu_"
_CODED = "toolu_x_"
_PLAIN = re.compile(r"(?!x_)[a-zA-Z0-9_-]+\Z")


def tool_use_id(call_id: str) -> str:
    """Returns Anthropic's form of the id of a call."""
    if _PLAIN.match(call_id):
        return _PREFIX + call_id
    return _CODED + call_id.encode().hex()


def call_id(tool_use_id: str) -> str:
    """Returns the model's id. Ids without the prefix, from other servers, are not changed."""
    if tool_use_id.startswith(_CODED):
        try:
            return bytes.fromhex(tool_use_id.removeprefix(_CODED)).decode()
        except ValueError:
            pass
    return tool_use_id.removeprefix(_PREFIX) or tool_use_id
