"""The form in which a chat template reads a history.

Templates differ in what they read of a message: some write only the first of several calls, some
no call of a message with text, and some ignore every system message after the first. A part
that a template does not read is missing in the prompt, without an error. So probes, small
conversations with texts that occur nowhere else, are rendered once for each template, in one form
after another: the first form whose texts all appear is the form of that template. If no form
works, for example because a template does not know calls, the conversation stays as it was sent.

Results of tools are ordered like their calls in every form, because many templates write results
without the ids of their calls: a model then reads the first result as that of the first call.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, product
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from swell.cluster.text.json_types import JsonObject
from swell.cluster.text.partial_arguments import read_partial_object
from swell.cluster.text.schema.chat_messages import ChatMessage, FunctionCall, MessageToolCall

TemplateValues = dict[str, Any]
"""Values by name, as a template reads them: a message, a tool, a call or variables."""
SYSTEM_ROLES = ("system", "developer")


class HistoryForm(NamedTuple):
    """Each field is a change of the conversation that a template needs."""

    one_call: bool = False
    """Parallel calls are messages with one call each, every one followed by its result."""
    text_arguments: bool = False
    """The arguments of a call are JSON text, instead of an object."""
    text_before_calls: bool = False
    """The text of a message with calls is a separate message; its reasoning stays with the
    calls."""
    one_system: bool = False
    """All system messages are joined to one at the beginning."""

    def message_dicts(
        self, messages: Sequence[ChatMessage], *, knows_developer: bool
    ) -> list[TemplateValues]:
        """Converts the messages for the template. Most templates know `system` and not its newer
        name `developer`."""
        plain = []
        for message in self._changed(messages):
            rename = message.role == "developer" and not knows_developer
            one: TemplateValues = {"role": "system" if rename else message.role}
            one["content"] = message.text
            for name in ("name", "tool_call_id"):
                if getattr(message, name) is not None:
                    one[name] = getattr(message, name)
            if message.thoughts is not None:
                one["reasoning_content"] = message.thoughts
            if message.tool_calls:
                one["tool_calls"] = [self._call_dict(call) for call in message.tool_calls]
            plain.append(one)
        return plain

    def _changed(self, messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
        messages = order_results(messages)
        if self.one_system:
            messages = _join_systems(messages)
        if self.text_before_calls:
            messages = _split_texts(messages)
        return _one_call_per_message(messages) if self.one_call else messages

    def _call_dict(self, call: MessageToolCall) -> TemplateValues:
        written, arguments = arguments_of(call.function.arguments)
        function = {
            "name": call.function.name,
            "arguments": written if self.text_arguments else arguments,
        }
        return {"id": call.id, "type": "function", "function": function}


def find_form(render: Callable[[HistoryForm, Sequence[ChatMessage]], str]) -> HistoryForm:
    """Returns the form of a template. `render` renders a conversation in a form, with a tool named
    `PROBE_CALL`; it may raise anything."""

    def writes(form: HistoryForm, probe: Sequence[ChatMessage], *texts: str) -> bool:
        try:
            written = render(form, probe)
        except Exception:  # a template is a program and may raise anything
            return False
        # A template that concatenates arguments writes an object as Python does, not as JSON.
        is_json = all(str({_NAME: text}) not in written for text in texts)
        return is_json and all(text in written for text in texts)

    # Forms with fewer changes come first.
    for changes in sorted(product((False, True), repeat=3), key=sum):
        form = HistoryForm(*changes)
        if writes(form, _PARALLEL, *_TEXTS[:4]) and writes(form, _TEXT_AND_CALL, *_TEXTS[:1]):
            break
    else:
        form = HistoryForm()
    joined = form._replace(one_system=True)
    if not writes(form, _SYSTEMS, *_TEXTS) and writes(joined, _SYSTEMS, *_TEXTS):
        return joined
    return form


PROBE_CALL = "probe_call"
_NAME = "text"
"""Name of the argument of the probe's calls."""
_TEXTS = [f"probe {number}" for number in (17, 29, 43, 58)]
_IDS = ("probe1234", "probe5678")
"""Nine letters and digits: the strictest templates accept only such an id."""


def _call(number: int) -> MessageToolCall:
    arguments = json.dumps({_NAME: _TEXTS[number]})
    return MessageToolCall(
        id=_IDS[number], function=FunctionCall(name=PROBE_CALL, arguments=arguments)
    )


def _result(number: int) -> ChatMessage:
    return ChatMessage(
        role="tool", tool_call_id=_IDS[number], name=PROBE_CALL, content=_TEXTS[2 + number]
    )


_ASK = ChatMessage(role="user", content="?")
_ANSWER = ChatMessage(role="assistant", content=".")
_PARALLEL = [
    _ASK,
    ChatMessage(role="assistant", tool_calls=[_call(0), _call(1)]),
    _result(0),
    _result(1),
]
_TEXT_AND_CALL = [
    _ASK,
    ChatMessage(role="assistant", content=".", reasoning_content=".", tool_calls=[_call(0)]),
    _result(0),
]
_SYSTEMS = [
    ChatMessage(role="system", content=_TEXTS[0]),
    ChatMessage(role="system", content=_TEXTS[1]),
    _ASK,
    _ANSWER,
    ChatMessage(role="system", content=_TEXTS[2]),
    _ASK,
    ChatMessage(role="system", content=_TEXTS[3]),
]


def order_results(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Puts adjacent results of tools into the order of their calls. Results with missing, unknown
    or repeated ids stay as they are."""
    ordered: list[ChatMessage] = []
    called: list[str] = []
    for role, adjacent in groupby(messages, key=attrgetter("role")):
        row = list(adjacent)
        if role == "tool":
            row = _in_order(row, called)
        called = [call.id for message in row for call in message.tool_calls or ()]
        ordered += row
    return ordered


def _in_order(results: list[ChatMessage], called: list[str]) -> list[ChatMessage]:
    place = {id: index for index, id in enumerate(called)}
    ids = {result.tool_call_id for result in results}
    if len(place) < len(called) or len(ids) < len(results) or not ids <= place.keys():
        return results
    return sorted(results, key=lambda result: place[result.tool_call_id or ""])


def _one_call_per_message(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Splits parallel tool calls into messages of one call each, every one followed by its
    result."""
    alone: list[ChatMessage] = []
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        results = []
        while len(message.tool_calls or ()) > 1 and rest and rest[0].role == "tool":
            results.append(rest.popleft())
        for index, call in enumerate(message.tool_calls or ()):
            if index == 0:
                one = msgspec.structs.replace(message, tool_calls=[call])
            else:
                one = ChatMessage(role=message.role, name=message.name, tool_calls=[call])
            own = [result for result in results if result.tool_call_id == call.id]
            alone += [one, *own]
            results = [result for result in results if result.tool_call_id != call.id]
        if not message.tool_calls:
            alone.append(message)
        alone += results
    return alone


def _split_texts(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    split: list[ChatMessage] = []
    for message in messages:
        if message.tool_calls and message.text:
            split.append(ChatMessage(role=message.role, name=message.name, content=message.text))
            message = msgspec.structs.replace(message, content=None)
        split.append(message)
    return split


def _join_systems(messages: Sequence[ChatMessage]) -> Sequence[ChatMessage]:
    systems = [message for message in messages if message.role in SYSTEM_ROLES]
    if not systems or (len(systems) == 1 and systems[0] is messages[0]):
        return messages
    text = "\n\n".join(message.text for message in systems)
    others = [message for message in messages if message.role not in SYSTEM_ROLES]
    return [msgspec.structs.replace(systems[0], content=text), *others]


def arguments_of(written: str) -> tuple[str, JsonObject]:
    """Returns the arguments of a call as JSON text and as an object. A model may have written
    something else: a JSON string with the text of an object stands for that object, and of an
    incomplete object the longest valid prefix is used."""
    value = _decoded(written)
    if isinstance(value, str):
        written, value = value, _decoded(value)
    if isinstance(value, dict):
        return written, value
    value = read_partial_object(written)
    return json.dumps(value, ensure_ascii=False), value


def _decoded(written: str) -> object:
    try:
        return msgspec.json.decode(written)
    except msgspec.DecodeError:
        return None
