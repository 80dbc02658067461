"""Converts the `input` of `/v1/responses` to items, from every form that a client may send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from swell.cluster.api.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Refusal,
    SummaryText,
    new_id,
)
from swell.cluster.text.errors import BadRequest, bad_value
from swell.cluster.text.schema.chat_messages import check_named, missing_field
from swell.cluster.text.schema.decode import decode
from swell.cluster.text.schema.request_body import HistoryPart, NotServed


class InputPart(HistoryPart, kw_only=True):
    """One part of an item. Parts other than text are refused by name."""

    type: str
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: Any = None
    """Accepted; prefixes are always cached."""
    image_url: NotServed = None
    file_id: NotServed = None
    file_data: NotServed = None
    file_url: NotServed = None
    filename: NotServed = None
    detail: NotServed = None
    input_audio: NotServed = None

    def checked_text(self, path: str, *types: str) -> str:
        """Returns the text. Raises `BadRequest` unless the part has one of `types`."""
        if self.type not in types:
            problem = f"is not supported here; it may be {' or '.join(map(repr, types))}"
            raise bad_value(f"{path}.type", self.type, problem, "unsupported_value")
        name = "refusal" if self.type == "refusal" else "text"
        text: str | None = getattr(self, name)
        if text is None:
            raise missing_field(f"{path}.{name}")
        self.refuse_unsupported(path + ".")
        return text


def _texts(parts: Sequence[InputPart], field: str, type: str) -> list[str]:
    return [part.checked_text(f"{field}[{index}]", type) for index, part in enumerate(parts)]


class InputItem(HistoryPart, kw_only=True):
    """Base class of all forms. `status` comes from an earlier answer and is ignored."""

    id: str | None = None
    status: Any = None

    def item(self) -> Item:
        """Returns the complete item. Raises `BadRequest` with a path relative to this item."""
        raise NotImplementedError


class InputMessage(InputItem, kw_only=True):
    """A message; `{role, content}` is enough."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]
    phase: Any = None
    """Accepted: a label of the client that chat templates do not use."""

    def item(self) -> MessageItem:
        own = OutputText if self.role == "assistant" else InputText
        content: list[InputText | OutputText | Refusal] = []
        if isinstance(self.content, str):
            content.append(own(text=self.content))
        else:
            refusal = ("refusal",) if self.role == "assistant" else ()
            for index, part in enumerate(self.content):
                text = part.checked_text(f"content[{index}]", "input_text", "output_text", *refusal)
                content.append(Refusal(refusal=text) if part.type == "refusal" else own(text=text))
        return MessageItem(id=self.id or new_id("msg"), role=self.role, content=content)


class _OfCall(InputItem, kw_only=True):
    """A call, or its result."""

    call_id: str
    namespace: NotServed = None
    caller: NotServed = None
    created_by: Any = None

    def check(self) -> None:
        self.refuse_unsupported()
        check_named(self.call_id, "call_id")


class InputFunctionCall(_OfCall, kw_only=True):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    name: str
    arguments: str
    is_async: Any = msgspec.field(default=None, name="async")
    async_: Any = None
    """The field `async`, as OpenAI's Python client spells it if it does not use the API's names."""

    def check(self) -> None:
        super().check()
        check_named(self.name, "name")

    def item(self) -> FunctionCallItem:
        return FunctionCallItem(
            id=self.id or new_id("fc"),
            call_id=self.call_id,
            name=self.name,
            arguments=self.arguments,
        )


class InputFunctionCallOutput(_OfCall, kw_only=True):
    """The result of a call."""

    type: Literal["function_call_output"]
    output: str | list[InputPart]
    name: Any = None

    def item(self) -> FunctionCallOutputItem:
        output: str | list[InputText] = []
        if isinstance(self.output, str):
            output = self.output
        else:
            output = [InputText(text=text) for text in _texts(self.output, "output", "input_text")]
        id = self.id or new_id("fco")
        return FunctionCallOutputItem(id=id, call_id=self.call_id, output=output)


class InputReasoning(InputItem, kw_only=True):
    """The reasoning of an earlier answer. `encrypted_content` is ignored like an unknown field:
    only the server that encrypted it can read it."""

    type: Literal["reasoning"]
    summary: list[InputPart] = []
    content: list[InputPart] | None = None

    def item(self) -> ReasoningItem:
        summary = _texts(self.summary, "summary", "summary_text")
        content = _texts(self.content or (), "content", "reasoning_text")
        return ReasoningItem(
            id=self.id or new_id("rs"),
            summary=[SummaryText(text=text) for text in summary],
            content=[ReasoningText(text=text) for text in content],
        )


FORMS: Mapping[str | None, type[InputItem]] = {
    "message": InputMessage,
    "function_call": InputFunctionCall,
    "function_call_output": InputFunctionCallOutput,
    "reasoning": InputReasoning,
    None: InputMessage,
}
"""The type of an input item for each value of `type`."""
_TYPES = ", ".join(filter(None, FORMS))


class _Kind(msgspec.Struct):
    type: str | None = None


def read_input(value: str | Sequence[msgspec.Raw]) -> list[Item]:
    """Returns the items of a request's `input`; a text becomes a user message. Raises
    `BadRequest`."""
    if isinstance(value, str):
        return [InputMessage(role="user", content=value).item()]
    if not value:
        raise BadRequest("input=[] must hold at least one item", "input")
    return [_read(bytes(raw), f"input[{index}]") for index, raw in enumerate(value)]


def _read(raw: bytes, path: str) -> Item:
    try:
        kind = msgspec.json.decode(raw, type=_Kind).type or None
    except msgspec.ValidationError:
        message = f"{path} must be an object whose type is one of {_TYPES}"
        raise BadRequest(message, path, "invalid_type") from None
    if kind not in FORMS:
        problem = f"is not supported; it may be {_TYPES}"
        raise bad_value(f"{path}.type", kind, problem, "unsupported_value")
    try:
        return decode(raw, FORMS[kind]).item()
    except BadRequest as error:
        raise error.within(path) from None
