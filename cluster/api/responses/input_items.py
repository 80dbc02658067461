"""The input of `/v1/responses`: every form that a client may send, brought into items."""

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
from swell.cluster.text.sampling_params import BadRequest, shown
from swell.cluster.text.schema.chat_messages import check_named
from swell.cluster.text.schema.decode import decode
from swell.cluster.text.schema.request_body import HistoryPart


class InputPart(HistoryPart, kw_only=True):
    """One part of an item; parts other than text are refused by name."""

    type: str
    text: str | None = None
    refusal: str | None = None
    prompt_cache_breakpoint: Any = None
    """Accepted; prefixes are always shared."""
    image_url: Any = None
    file_id: Any = None
    file_data: Any = None
    file_url: Any = None
    filename: Any = None
    detail: Any = None
    input_audio: Any = None

    NOT_SERVED = dict.fromkeys(
        ("image_url", "file_id", "file_data", "file_url", "filename", "detail", "input_audio"), ()
    )

    def checked_text(self, path: str, *types: str) -> str:
        """The text; raises `BadRequest` unless the part is of one of `types`."""
        if self.type not in types:
            raise BadRequest(
                f"{path}.type={shown(self.type)} is not supported here; it may be "
                f"{' or '.join(map(repr, types))}",
                f"{path}.type",
                "unsupported_value",
            )
        name = "refusal" if self.type == "refusal" else "text"
        text: str | None = getattr(self, name)
        if text is None:
            raise BadRequest(
                f"the required field '{path}.{name}' is missing", f"{path}.{name}", "missing_field"
            )
        self.refuse_unsupported(path + ".")
        return text


class InputItem(HistoryPart, kw_only=True):
    """Base of every form; `status` is what an answer said and changes nothing."""

    id: str | None = None
    status: Any = None

    def item(self) -> Item:
        """The complete item. Raises `BadRequest` with a path below this item."""
        raise NotImplementedError


class InputMessage(InputItem, kw_only=True):
    """A message; `{role, content}` is enough."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputPart]
    phase: Any = None
    """Accepted: a label of the client's, which no chat template knows."""

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


class InputFunctionCall(InputItem, kw_only=True):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: Any = None
    caller: Any = None
    created_by: Any = None
    is_async: Any = msgspec.field(default=None, name="async")
    async_: Any = None
    """The same, as OpenAI's client writes it without the option to use the API's names."""

    NOT_SERVED = {"namespace": (), "caller": ()}

    def check(self) -> None:
        self.refuse_unsupported()
        check_named(self.call_id, "call_id")
        check_named(self.name, "name")

    def item(self) -> FunctionCallItem:
        return FunctionCallItem(
            id=self.id or new_id("fc"),
            call_id=self.call_id,
            name=self.name,
            arguments=self.arguments,
        )


class InputFunctionCallOutput(InputItem, kw_only=True):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputPart]
    name: Any = None
    namespace: Any = None
    caller: Any = None
    created_by: Any = None

    NOT_SERVED = {"namespace": (), "caller": ()}

    def check(self) -> None:
        self.refuse_unsupported()
        check_named(self.call_id, "call_id")

    def item(self) -> FunctionCallOutputItem:
        output = self.output
        return FunctionCallOutputItem(
            id=self.id or new_id("fco"),
            call_id=self.call_id,
            output=output
            if isinstance(output, str)
            else [
                InputText(text=part.checked_text(f"output[{index}]", "input_text"))
                for index, part in enumerate(output)
            ],
        )


class InputReasoning(InputItem, kw_only=True):
    """What an earlier answer thought. `encrypted_content` is ignored as what is unknown: it can be
    read by its maker alone."""

    type: Literal["reasoning"]
    summary: list[InputPart] = []
    content: list[InputPart] | None = None

    def item(self) -> ReasoningItem:
        return ReasoningItem(
            id=self.id or new_id("rs"),
            summary=[
                SummaryText(text=part.checked_text(f"summary[{index}]", "summary_text"))
                for index, part in enumerate(self.summary)
            ],
            content=[
                ReasoningText(text=part.checked_text(f"content[{index}]", "reasoning_text"))
                for index, part in enumerate(self.content or ())
            ],
        )


FORMS: Mapping[str, type[InputItem]] = {
    "message": InputMessage,
    "function_call": InputFunctionCall,
    "function_call_output": InputFunctionCallOutput,
    "reasoning": InputReasoning,
}


ITEMS: Mapping[str | None, type[InputItem]] = {None: InputMessage} | dict(FORMS)
"""By `type`; what has none is a message."""


class _Kind(msgspec.Struct):
    type: str | None = None


def read_input(value: str | Sequence[msgspec.Raw]) -> list[Item]:
    """The items of a request's `input`; a text is what the user says. Raises `BadRequest`."""
    if isinstance(value, str):
        return [InputMessage(role="user", content=value).item()]
    if not value:
        raise BadRequest("input=[] must hold at least one item", "input")
    return [_read(bytes(raw), f"input[{index}]") for index, raw in enumerate(value)]


def _read(raw: bytes, path: str) -> Item:
    try:
        kind = msgspec.json.decode(raw, type=_Kind).type or "message"
    except msgspec.ValidationError:
        raise BadRequest(
            f"{path} must be an object whose type is one of {', '.join(FORMS)}",
            path,
            "invalid_type",
        ) from None
    if kind not in FORMS:
        raise BadRequest(
            f"{path}.type={shown(kind)} is not supported; it may be {', '.join(FORMS)}",
            f"{path}.type",
            "unsupported_value",
        )
    try:
        return decode(raw, FORMS[kind]).item()
    except BadRequest as error:
        raise error.within(path) from None
