"""Writes the answer of `/v1/responses`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from random import Random
from typing import Any

import msgspec

from swell.cluster.api.answers.logprobs import ChatTokenLogprob
from swell.cluster.api.answers.output_parts import make_part_reader
from swell.cluster.api.answers.response_writer import ResponseWriter
from swell.cluster.api.bodies.http_errors import ErrorInfo
from swell.cluster.api.bodies.protocol_base import Usage, named_event
from swell.cluster.api.responses import events
from swell.cluster.api.responses.events import Event
from swell.cluster.api.responses.items import (
    FunctionCallItem,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
    new_id,
)
from swell.cluster.api.responses.response import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseBody,
    ResponseUsage,
)
from swell.cluster.client.requests.outputs import CompletionOutput, RequestOutput
from swell.cluster.text.parsers import deltas as parts
from swell.cluster.text.parsers.base import Parser
from swell.cluster.text.random_ids import SYSTEM_RANDOM

_LAST = {
    "completed": events.Completed,
    "incomplete": events.Incomplete,
    "failed": events.Failed,
}


class ResponsesWriter(ResponseWriter):
    """Fills `response`, which has begun.

    Whole and streamed answers go through the same writer, so they have the same content. `finalize`
    commits a response that has ended. `top_logprobs` is that of `make_part_reader`; `random` is the
    source of the ids of items.
    """

    def __init__(
        self,
        response: ResponseBody,
        make_parser: Callable[[], Parser],
        finalize: Callable[[], Awaitable[None]],
        top_logprobs: int | None = None,
        *,
        include_timings: bool | None = None,
        random: Random = SYSTEM_RANDOM,
    ) -> None:
        super().__init__(response.id, response.model, include_timings=include_timings)
        self.response = response
        self._finalize = finalize
        self._read = make_part_reader(make_parser(), top_logprobs)
        self._writer = _OutputItemWriter(response.output, random)
        self._sequence = 0

    def full_response(self, outputs: list[RequestOutput], usage: Usage) -> ResponseBody:
        """Returns the response."""
        (output,) = outputs
        for _ in self._write(output.outputs[0]):
            pass
        self._end(usage)
        return self.response

    def fail(self, error: ErrorInfo) -> None:
        """Ends the answer with an error. The output so far is kept, as incomplete."""
        for _ in self._writer.close("incomplete"):
            pass
        self.response.fail(error.message, error.status)

    async def commit(self, engines: str) -> None:
        await self._finalize()

    # ---------------------------------------------------------------- as a stream

    def stream_done(self) -> Iterable[bytes]:
        """Returns the event with the response, as it was committed."""
        yield self._event(_LAST[self.response.status](response=self.response))

    def stream_start(self, choices: int) -> Iterable[bytes]:
        if self._sequence:
            return  # they were sent before the first output
        yield self._event(events.Created(response=self.response))
        yield self._event(events.InProgress(response=self.response))

    def delta(self, choice: int, output: RequestOutput, part: CompletionOutput) -> Iterator[bytes]:
        yield from map(self._event, self._write(part))

    def stream_end(self, usage: Usage) -> Iterable[bytes]:
        self._end(usage)
        return ()

    def stream_error(self, error: ErrorInfo) -> Iterable[bytes]:
        self.fail(error)
        return ()

    # ---------------------------------------------------------------- whole and streamed answers

    def _write(self, part: CompletionOutput) -> Iterator[Event]:
        for said, logprobs in self._read(part):
            yield from self._writer.write(said, logprobs)
        if part.finish_reason is not None:
            cut = part.finish_reason == "length"
            yield from self._writer.finish("incomplete" if cut else "completed")
            self.response.status = "incomplete" if cut else "completed"

    def _end(self, usage: Usage) -> None:
        response = self.response
        if response.status == "incomplete":
            response.incomplete_details = IncompleteDetails()
        else:
            response.completed_at = int(time.time())
        response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=usage.prompt_tokens_details.cached_tokens
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(),
            total_tokens=usage.total_tokens,
        )
        response.timings = self.timings()

    def _event(self, event: Event) -> bytes:
        event.sequence_number = self._sequence
        self._sequence += 1
        return named_event(event)


class _OutputItemWriter:
    """Turns parts into events, and adds the resulting items to `items`. One item is open at a time,
    and it ends when a part belongs to another item: adjacent parts of one kind form one item. The
    last item holds its text only after it is closed."""

    def __init__(self, items: list[OutputItem], random: Random = SYSTEM_RANDOM) -> None:
        """`random` is the source of the ids of items."""
        self._items = items
        self._random = random
        self._open: OutputItem | None = None
        self._texts: list[str] = []
        """Texts of the open item. The next two attributes belong to it, too."""
        self._logprobs: list[ChatTokenLogprob] = []
        self._place: dict[str, Any] = {}
        """Fields of every event of the open item."""

    def write(self, part: parts.AnswerDelta, logprobs: list[ChatTokenLogprob]) -> Iterator[Event]:
        """Yields the events of a part. `logprobs` are those of the tokens of a content."""
        match part:
            case parts.Content(text):
                if not isinstance(self._open, MessageItem):
                    yield from self._begin_message()
            case parts.Reasoning(text):
                if not isinstance(self._open, ReasoningItem):
                    reasoning = ReasoningItem(id=new_id("rs", self._random), status="in_progress")
                    yield from self._begin(reasoning, ReasoningText(text=""))
            case parts.ToolCall(_, id, name):
                call = FunctionCallItem(
                    id=new_id("fc", self._random), call_id=id, name=name, arguments=""
                )
                call.status = "in_progress"
                yield from self._begin(call)
                return
            case parts.Arguments(_, text):
                assert isinstance(self._open, FunctionCallItem), "calls come one after the other"
        if text:
            self._texts.append(text)
            yield self._delta(text, logprobs)

    def finish(self, status: Status) -> Iterator[Event]:
        """Ends the answer. An answer without text becomes one empty message."""
        if not self._items:
            yield from self._begin_message()
        yield from self.close(status)

    def close(self, status: Status = "completed") -> Iterator[Event]:
        """Closes the open item with its whole text. The last item may have been cut off."""
        item, text = self._open, "".join(self._texts)
        if item is None:
            return
        part: OutputText | ReasoningText
        match item:
            case MessageItem():
                part = OutputText(text=text, logprobs=self._logprobs)
                item.content = [part]
                yield events.OutputTextDone(**self._place, text=text, logprobs=part.logprobs)
                yield events.PartDone(**self._place, part=part)
            case ReasoningItem():
                part = ReasoningText(text=text)
                item.content = [part]
                yield events.ReasoningDone(**self._place, text=text)
                yield events.PartDone(**self._place, part=part)
            case FunctionCallItem():
                item.arguments = text
                yield events.ArgumentsDone(**self._place, name=item.name, arguments=text)
        item.status = status
        yield events.ItemDone(output_index=len(self._items) - 1, item=item)
        self._open = None

    def _begin_message(self) -> Iterator[Event]:
        message = MessageItem(
            id=new_id("msg", self._random), role="assistant", status="in_progress", content=[]
        )
        yield from self._begin(message, OutputText(text=""))

    def _begin(
        self, item: OutputItem, part: OutputText | ReasoningText | None = None
    ) -> Iterator[Event]:
        """Opens an item. `part` is the part of its content, before its text."""
        yield from self.close()
        self._open, self._texts, self._logprobs = item, [], []
        index = len(self._items)
        self._place = {"item_id": item.id, "output_index": index}
        self._items.append(item)
        yield events.ItemAdded(output_index=index, item=msgspec.structs.replace(item))
        if part is not None:
            yield events.PartAdded(**self._place, part=part)

    def _delta(self, text: str, logprobs: list[ChatTokenLogprob]) -> Event:
        match self._open:
            case MessageItem():
                self._logprobs += logprobs
                return events.OutputTextDelta(**self._place, delta=text, logprobs=logprobs)
            case ReasoningItem():
                return events.ReasoningDelta(**self._place, delta=text)
        return events.ArgumentsDelta(**self._place, delta=text)
