"""Writes the parts of an answer as the items of a response."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec

from swell.cluster.api.answers.logprobs import ChatTokenLogprob
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
from swell.cluster.text.parsers import deltas as parts
from swell.cluster.text.random_ids import SYSTEM_RANDOM


class OutputItemWriter:
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
