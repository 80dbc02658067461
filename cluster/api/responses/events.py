"""The events of a streamed `/v1/responses` answer, in their order:

    created, in_progress
    for each item, one after the other:
        output_item.added
            message:   content_part.added, output_text.delta ..., output_text.done,
                       content_part.done
            reasoning: content_part.added, reasoning_text.delta ..., reasoning_text.done,
                       content_part.done
            function:  function_call_arguments.delta ..., function_call_arguments.done
        output_item.done
    completed, incomplete or failed

`sequence_number` counts the events from 0.
"""

from __future__ import annotations

from swell.cluster.api.answers.logprobs import ChatTokenLogprob
from swell.cluster.api.bodies.protocol_base import Body
from swell.cluster.api.responses.items import OutputItem, OutputText, ReasoningText
from swell.cluster.api.responses.response import ResponseBody


class Event(Body, kw_only=True, tag_field="type"):
    sequence_number: int = 0


class _OfResponse(Event, kw_only=True):
    response: ResponseBody


class Created(_OfResponse, kw_only=True, tag="response.created"):
    pass


class InProgress(_OfResponse, kw_only=True, tag="response.in_progress"):
    pass


class Completed(_OfResponse, kw_only=True, tag="response.completed"):
    pass


class Incomplete(_OfResponse, kw_only=True, tag="response.incomplete"):
    pass


class Failed(_OfResponse, kw_only=True, tag="response.failed"):
    pass


class ErrorEvent(Event, kw_only=True, tag="error"):
    """The only event of a stream whose head was sent before the response existed, and that then
    failed."""

    code: str | None
    message: str
    param: str | None


class _OfItem(Event, kw_only=True):
    output_index: int
    item: OutputItem


class ItemAdded(_OfItem, kw_only=True, tag="response.output_item.added"):
    pass


class ItemDone(_OfItem, kw_only=True, tag="response.output_item.done"):
    pass


class _Within(Event, kw_only=True):
    """Base class of events about a part of an item."""

    item_id: str
    output_index: int


class _WithinPart(_Within, kw_only=True):
    content_index: int = 0
    """Always 0: an item has one part."""


class _OfPart(_WithinPart, kw_only=True):
    part: OutputText | ReasoningText


class PartAdded(_OfPart, kw_only=True, tag="response.content_part.added"):
    pass


class PartDone(_OfPart, kw_only=True, tag="response.content_part.done"):
    pass


class OutputTextDelta(_WithinPart, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChatTokenLogprob] = []


class OutputTextDone(_WithinPart, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ChatTokenLogprob] = []


class ReasoningDelta(_WithinPart, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_WithinPart, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_Within, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_Within, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


ResponseEvent = (
    Created
    | InProgress
    | ItemAdded
    | PartAdded
    | OutputTextDelta
    | OutputTextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | PartDone
    | ItemDone
    | Completed
    | Incomplete
    | Failed
    | ErrorEvent
)
