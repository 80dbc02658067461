"""The parts of a parsed answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby

import msgspec

from swell.cluster.text.json_types import JsonSchema


class Tool(msgspec.Struct, frozen=True):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: JsonSchema = {}
    """JSON schema of the arguments, which are an object; empty if the function takes no
    arguments."""


class Content(msgspec.Struct, frozen=True, tag=True):
    """More content of the answer."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, tag=True):
    """More reasoning of the answer."""

    text: str


class ToolCall(msgspec.Struct, frozen=True, tag=True):
    """Begins call number `index` of this answer. Its arguments follow."""

    index: int
    id: str
    name: str


class Arguments(msgspec.Struct, frozen=True, tag=True):
    """More JSON text of the arguments of call `index`, as the model wrote it."""

    index: int
    text: str


AnswerDelta = Content | Reasoning | ToolCall | Arguments


class WholeCall(msgspec.Struct, frozen=True):
    id: str
    name: str
    arguments: str
    """JSON text. It is not checked: a model may have written invalid or incomplete JSON."""


class Message(msgspec.Struct, frozen=True):
    content: str | None
    reasoning: str | None
    tool_calls: list[WholeCall]


def merge(deltas: Iterable[AnswerDelta]) -> list[AnswerDelta]:
    """Merges adjacent deltas that continue each other; returns the same answer in the fewest
    deltas."""
    whole = [delta for delta in deltas if isinstance(delta, ToolCall) or delta.text]
    if len(whole) < 2:
        return whole
    merged: list[AnswerDelta] = []
    # Arguments of two calls are never adjacent: the second call begins between them.
    for kind, group in groupby(whole, key=type):
        parts = list(group)
        if kind is not ToolCall and len(parts) > 1:
            text = "".join(one.text for one in parts if not isinstance(one, ToolCall))
            parts = [msgspec.structs.replace(parts[0], text=text)]
        merged += parts
    return merged


def collect(deltas: Iterable[AnswerDelta]) -> Message:
    """Returns the whole answer. Content and reasoning are None if there is none."""
    texts: defaultdict[object, list[str]] = defaultdict(list)
    """Texts by kind; those of arguments by their call."""
    calls: list[ToolCall] = []
    for delta in deltas:
        if isinstance(delta, ToolCall):
            calls.append(delta)
        else:
            texts[delta.index if isinstance(delta, Arguments) else type(delta)].append(delta.text)
    return Message(
        content="".join(texts[Content]) or None,
        reasoning="".join(texts[Reasoning]) or None,
        tool_calls=[WholeCall(call.id, call.name, "".join(texts[call.index])) for call in calls],
    )
