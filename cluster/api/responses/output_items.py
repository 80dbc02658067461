"""The parts of an answer, written as the items of a response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from swell.cluster.api.logprobs import ChatTokenLogprob
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


class OutputItemWriter:
    """Parts in, events out; `items` are what the events carry. One item is open at a time, and it
    ends where a part belongs to another: parts of one kind that follow each other are one item.
    """

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        """The last of them holds its text only once it is closed."""
        self._open: _ItemBuilder | None = None

    @property
    def reasoning(self) -> list[str]:
        """The texts of the closed reasoning items."""
        found = [item.content for item in self.items if isinstance(item, ReasoningItem)]
        return [part.text for content in found for part in content]

    def write(
        self, part: parts.AnswerDelta, logprobs: Sequence[ChatTokenLogprob] = ()
    ) -> Iterator[Event]:
        """`logprobs` are those of a content's tokens."""
        match part:
            case parts.Content(text):
                if not isinstance(self._open, _MessageBuilder):
                    yield from self._begin(_MessageBuilder(len(self.items)))
            case parts.Reasoning(text):
                if not isinstance(self._open, _ReasoningBuilder):
                    yield from self._begin(_ReasoningBuilder(len(self.items)))
            case parts.ToolCall(_, id, name):
                yield from self._begin(_FunctionCallBuilder(len(self.items), id, name))
                return
            case parts.Arguments(_, text):
                assert isinstance(self._open, _FunctionCallBuilder), (
                    "calls come one after the other"
                )
        assert self._open is not None
        if text:
            yield self._open.append(text, list(logprobs))

    def close(self, status: Status = "completed") -> Iterator[Event]:
        """The open item ends; the last one may have been cut off."""
        if self._open is None:
            return
        yield from self._open.end(status)
        self._open = None

    def finish(self, status: Status) -> Iterator[Event]:
        """Nothing follows. An answer without text is one empty message."""
        if not self.items:
            yield from self._begin(_MessageBuilder(0))
        yield from self.close(status)

    def _begin(self, item: _ItemBuilder) -> Iterator[Event]:
        yield from self.close()
        self._open = item
        self.items.append(item.item)
        yield from item.begin()


class _ItemBuilder:
    """An item that grows. `item` is sent as it was when it began, and filled when it ends."""

    item: OutputItem

    def __init__(self, index: int) -> None:
        self.index = index
        self._texts: list[str] = []

    def begin(self) -> Iterator[Event]:
        yield events.ItemAdded(output_index=self.index, item=msgspec.structs.replace(self.item))

    def append(self, text: str, logprobs: list[ChatTokenLogprob]) -> Event:
        self._texts.append(text)
        return self._delta(text, logprobs)

    def end(self, status: Status) -> Iterator[Event]:
        yield from self._done("".join(self._texts))
        self.item.status = status
        yield events.ItemDone(output_index=self.index, item=self.item)

    @property
    def _place(self) -> dict[str, Any]:
        """What every event within the item has."""
        return {"item_id": self.item.id, "output_index": self.index}

    def _delta(self, text: str, logprobs: list[ChatTokenLogprob]) -> Event:
        raise NotImplementedError

    def _done(self, text: str) -> Iterator[Event]:
        """Fills the item with its whole text."""
        raise NotImplementedError


class _MessageBuilder(_ItemBuilder):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.item: MessageItem = MessageItem(
            id=new_id("msg"), role="assistant", status="in_progress", content=[]
        )
        self._logprobs: list[ChatTokenLogprob] = []

    def begin(self) -> Iterator[Event]:
        yield from super().begin()
        yield events.PartAdded(**self._place, part=OutputText(text=""))

    def _delta(self, text: str, logprobs: list[ChatTokenLogprob]) -> Event:
        self._logprobs += logprobs
        return events.OutputTextDelta(**self._place, delta=text, logprobs=logprobs)

    def _done(self, text: str) -> Iterator[Event]:
        part = OutputText(text=text, logprobs=self._logprobs)
        self.item.content = [part]
        yield events.OutputTextDone(**self._place, text=text, logprobs=part.logprobs)
        yield events.PartDone(**self._place, part=part)


class _ReasoningBuilder(_ItemBuilder):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.item: ReasoningItem = ReasoningItem(id=new_id("rs"), status="in_progress")

    def begin(self) -> Iterator[Event]:
        yield from super().begin()
        yield events.PartAdded(**self._place, part=ReasoningText(text=""))

    def _delta(self, text: str, logprobs: list[ChatTokenLogprob]) -> Event:
        return events.ReasoningDelta(**self._place, delta=text)

    def _done(self, text: str) -> Iterator[Event]:
        part = ReasoningText(text=text)
        self.item.content = [part]
        yield events.ReasoningDone(**self._place, text=text)
        yield events.PartDone(**self._place, part=part)


class _FunctionCallBuilder(_ItemBuilder):
    def __init__(self, index: int, call_id: str, name: str) -> None:
        super().__init__(index)
        self.item: FunctionCallItem = FunctionCallItem(
            id=new_id("fc"), call_id=call_id, name=name, arguments="", status="in_progress"
        )

    def _delta(self, text: str, logprobs: list[ChatTokenLogprob]) -> Event:
        return events.ArgumentsDelta(**self._place, delta=text)

    def _done(self, text: str) -> Iterator[Event]:
        self.item.arguments = text
        yield events.ArgumentsDone(**self._place, name=self.item.name, arguments=text)
