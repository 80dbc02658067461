"""What an answer says, written as the items of a response."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from swell.cluster.api.logprobs_protocol import ChatTokenLogprob
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
    """Parts in, events out; `items` are what the events tell. One item is open at a time, and it
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
            yield self._open.more(text, list(logprobs))

    def close(self, status: Status = "completed") -> Iterator[Event]:
        """The open item ends; the last one may have been cut off."""
        if self._open is None:
            return
        yield from self._open.end(status)
        self._open = None

    def finish(self, status: Status) -> Iterator[Event]:
        """Nothing follows. An answer without a word is one empty message."""
        if not self.items:
            yield from self._begin(_MessageBuilder(0))
        yield from self.close(status)

    def _begin(self, item: _ItemBuilder) -> Iterator[Event]:
        yield from self.close()
        self._open = item
        self.items.append(item.item)
        yield from item.begin()


class _ItemBuilder:
    """An item that grows. `item` is told as it was when it began, and filled when it ends."""

    item: OutputItem

    def __init__(self, index: int) -> None:
        self.index = index
        self._texts: list[str] = []

    def begin(self) -> Iterator[Event]:
        yield events.ItemAdded(output_index=self.index, item=msgspec.structs.replace(self.item))

    def more(self, text: str, logprobs: list[ChatTokenLogprob]) -> Event:
        raise NotImplementedError

    def end(self, status: Status) -> Iterator[Event]:
        self.item.status = status
        yield events.ItemDone(output_index=self.index, item=self.item)

    @property
    def _text(self) -> str:
        return "".join(self._texts)


class _MessageBuilder(_ItemBuilder):
    item: MessageItem

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.item = MessageItem(
            id=new_id("msg"), role="assistant", status="in_progress", content=[]
        )
        self._logprobs: list[ChatTokenLogprob] = []

    def begin(self) -> Iterator[Event]:
        yield from super().begin()
        yield events.PartAdded(
            item_id=self.item.id, output_index=self.index, part=OutputText(text="")
        )

    def more(self, text: str, logprobs: list[ChatTokenLogprob]) -> Event:
        self._texts.append(text)
        self._logprobs += logprobs
        return events.OutputTextDelta(
            item_id=self.item.id, output_index=self.index, delta=text, logprobs=logprobs
        )

    def end(self, status: Status) -> Iterator[Event]:
        part = OutputText(text=self._text, logprobs=self._logprobs)
        id, index = self.item.id, self.index
        yield events.OutputTextDone(
            item_id=id, output_index=index, text=part.text, logprobs=part.logprobs
        )
        yield events.PartDone(item_id=id, output_index=index, part=part)
        self.item.content = [part]
        yield from super().end(status)


class _ReasoningBuilder(_ItemBuilder):
    item: ReasoningItem

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.item = ReasoningItem(id=new_id("rs"), status="in_progress")

    def begin(self) -> Iterator[Event]:
        yield from super().begin()
        yield events.PartAdded(
            item_id=self.item.id, output_index=self.index, part=ReasoningText(text="")
        )

    def more(self, text: str, logprobs: list[ChatTokenLogprob]) -> Event:
        self._texts.append(text)
        return events.ReasoningDelta(item_id=self.item.id, output_index=self.index, delta=text)

    def end(self, status: Status) -> Iterator[Event]:
        part = ReasoningText(text=self._text)
        id, index = self.item.id, self.index
        yield events.ReasoningDone(item_id=id, output_index=index, text=part.text)
        yield events.PartDone(item_id=id, output_index=index, part=part)
        self.item.content = [part]
        yield from super().end(status)


class _FunctionCallBuilder(_ItemBuilder):
    item: FunctionCallItem

    def __init__(self, index: int, call_id: str, name: str) -> None:
        super().__init__(index)
        self.item = FunctionCallItem(
            id=new_id("fc"), call_id=call_id, name=name, arguments="", status="in_progress"
        )

    def more(self, text: str, logprobs: list[ChatTokenLogprob]) -> Event:
        self._texts.append(text)
        return events.ArgumentsDelta(item_id=self.item.id, output_index=self.index, delta=text)

    def end(self, status: Status) -> Iterator[Event]:
        self.item.arguments = self._text
        yield events.ArgumentsDone(
            item_id=self.item.id,
            output_index=self.index,
            name=self.item.name,
            arguments=self._text,
        )
        yield from super().end(status)
