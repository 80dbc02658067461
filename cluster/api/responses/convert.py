"""Converts a request of `/v1/responses` to one of `/v1/chat/completions`, with everything that
determines the answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from swell.cluster.api.bodies.generation_body import JsonSchemaFormat, ResponseFormat
from swell.cluster.api.bodies.sampling_fields import SamplingFields
from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.api.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    Refusal,
)
from swell.cluster.api.responses.protocol import (
    LOGPROBS,
    AllowedToolsChoice,
    FunctionChoice,
    ResponsesRequest,
    TextFormat,
)
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.params.field_path import join_path, split_path
from swell.cluster.text.schema import chat_messages as chat

_SHARED_FIELDS = (
    *SamplingFields.__struct_fields__,
    "parallel_tool_calls",
    "chat_template_kwargs",
    "stream",
)
"""Fields with the same meaning in both requests."""


def chat_request(
    body: ResponsesRequest, items: Sequence[Item], before: Sequence[Item] = ()
) -> ChatCompletionRequest:
    """Converts a request. `items` are those of the body, `before` those of the conversation that it
    continues. Raises `BadRequest` with the field names of `/v1/responses`."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SHARED_FIELDS}
    if LOGPROBS in (body.include or ()):
        fields["logprobs"], fields["top_logprobs"] = True, body.top_logprobs
    messages = chat_messages([*before, *items])
    if body.instructions is not None:
        messages.insert(0, chat.ChatMessage(role="system", content=body.instructions))
    request = ChatCompletionRequest(
        **fields,
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        tools=[
            chat.ToolDefinition(type="function", function=tool) for tool in body.function_tools()
        ]
        or None,
        tool_choice=_choice(body.function_choice()),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        response_format=_form(body.text.format if body.text else None),
    )
    try:
        request.check()
    except BadRequest as error:
        raise error.renamed(name_of) from None
    return request


def chat_messages(items: Iterable[Item]) -> list[chat.ChatMessage]:
    """Converts items to chat messages. A turn of the assistant is reasoning, then text, then calls.
    Items in this order become one message, since chat templates write a turn as one message."""
    messages: list[chat.ChatMessage] = []
    reasoned: list[tuple[chat.ChatMessage, list[str]]] = []
    """Turns with the parts of their reasoning, which are joined at the end."""
    for item in items:
        turn = messages[-1] if messages and messages[-1].role == "assistant" else None
        begun = turn if turn and turn.content is None and turn.tool_calls is None else None
        """The last turn, if it only has reasoning so far."""
        match item:
            case ReasoningItem():
                text = "\n".join(part.text for part in item.content or item.summary)
                if not text:  # it was encrypted, or is empty
                    continue
                if begun is None:
                    messages.append(chat.ChatMessage(role="assistant"))
                    reasoned.append((messages[-1], []))
                reasoned[-1][1].append(text)
            case MessageItem(role="assistant") if begun is not None:
                begun.content = _content(item)
            case MessageItem():
                messages.append(chat.ChatMessage(role=item.role, content=_content(item)))
            case FunctionCallItem():
                function = chat.FunctionCall(name=item.name, arguments=item.arguments)
                call = chat.MessageToolCall(id=item.call_id, function=function)
                if turn is None:
                    messages.append(chat.ChatMessage(role="assistant", tool_calls=[call]))
                elif turn.tool_calls is None:
                    turn.tool_calls = [call]
                else:
                    turn.tool_calls.append(call)
            case FunctionCallOutputItem():
                content = item.output if isinstance(item.output, str) else _parts(item.output)
                message = chat.ChatMessage(role="tool", tool_call_id=item.call_id, content=content)
                messages.append(message)
    for turn, texts in reasoned:
        turn.reasoning_content = "\n".join(texts)
    return messages


def _content(item: MessageItem) -> str | list[chat.ContentPart]:
    parts = _parts(item.content)
    return parts[0].text or "" if len(parts) == 1 and parts[0].type == "text" else parts


def _parts(content: Sequence[InputText | OutputText | Refusal]) -> list[chat.ContentPart]:
    return [
        chat.ContentPart(type="refusal", refusal=part.refusal)
        if isinstance(part, Refusal)
        else chat.ContentPart(type="text", text=part.text)
        for part in content
    ]


def _choice(choice: str | FunctionChoice | AllowedToolsChoice | None) -> chat.ToolChoice | None:
    if isinstance(choice, AllowedToolsChoice):
        tools = [
            chat.AllowedTool(function=chat.FunctionName(name=tool.name)) for tool in choice.tools
        ]
        allowed = chat.AllowedTools(mode=choice.mode, tools=tools)
        return chat.NamedToolChoice(type="allowed_tools", allowed_tools=allowed)
    if isinstance(choice, FunctionChoice):
        return chat.NamedToolChoice(type="function", function=chat.FunctionName(name=choice.name))
    return choice  # type: ignore[return-value]  # one of the literals of chat.ToolChoice


def _form(form: TextFormat | None) -> ResponseFormat | None:
    if form is None:
        return None
    schema = None
    if form.type == "json_schema":
        assert form.name is not None, "the form was checked"
        schema = JsonSchemaFormat(
            name=form.name, description=form.description, schema=form.schema, strict=form.strict
        )
    return ResponseFormat(type=form.type, json_schema=schema)


def name_of(path: str) -> str:
    """Converts the path of a field of a chat request to the path in a `/v1/responses` request."""
    match split_path(path):
        case ["messages", int(), str(), *rest] | ["messages", int() | str(), *rest]:
            return join_path(["input", *rest])
        case ["messages", *rest]:
            return join_path(["input", *rest])
        case ["max_tokens" | "max_completion_tokens", *rest]:
            return join_path(["max_output_tokens", *rest])
        case ["response_format", "json_schema", *rest] | ["response_format", *rest]:
            return join_path(["text", "format", *rest])
        case ["tools", int(index), "function", *rest]:
            return join_path(["tools", index, *rest])
        case ["tool_choice", "allowed_tools", *rest]:
            return join_path(["tool_choice", *rest])
    return path
