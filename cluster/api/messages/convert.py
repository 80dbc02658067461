"""Converts bodies of `/v1/messages` and `/v1/messages/count_tokens`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from operator import attrgetter
from typing import Any

from swell.cluster.api.messages.blocks import (
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    text_of,
)
from swell.cluster.api.messages.content import call_id
from swell.cluster.api.messages.protocol import (
    CountTokensRequest,
    InputMessage,
    MessagesRequest,
    ToolChoice,
)
from swell.cluster.text.json_types import JsonObject
from swell.cluster.text.params.sampling_params import SamplingParams, StructuredOutputs
from swell.cluster.text.prompt.chat_template import THINKING_VARIABLES, TemplateOptions
from swell.cluster.text.prompt.generation_request import Conversation, GenerationRequest
from swell.cluster.text.prompt.truncation import TEMPLATE_TEXT
from swell.cluster.text.schema import chat_messages as chat

_MERGED_ROLES = ("user", "assistant")
"""Roles whose adjacent messages are merged, as in Anthropic's API."""
_PARAM_NAMES = {"stop": "stop_sequences"}
_SCHEMA_FIELD = "output_config.format.schema"


def to_generation_request(body: MessagesRequest, defaults: Mapping[str, Any]) -> GenerationRequest:
    """Converts a checked body. `defaults` are the model's, for fields of `SamplingParams` that the
    body leaves out. In this API it is not an error if an answer reaches the end of the context."""
    form = None if body.output_config is None else body.output_config.format
    given = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
        "seed": body.seed,
        "structured_outputs": None if form is None else StructuredOutputs(json=form.schema),
    }
    sampling = {name: value for name, value in given.items() if value is not None}
    return GenerationRequest(
        prompt=conversation(body),
        prompt_field="messages",
        params=SamplingParams(**{**defaults, **sampling}, max_tokens=None),
        param_names=_PARAM_NAMES,
        structured_outputs_field=None if form is None else _SCHEMA_FIELD,
        tokenize_options=TEMPLATE_TEXT,
        max_tokens_in_context=body.max_tokens,
        stream=bool(body.stream),
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        data_parallel_rank=body.data_parallel_rank,
    )


def conversation(body: CountTokensRequest) -> Conversation:
    """Returns the conversation that the model reads, and the rules for its answer."""
    messages = chat_messages(body)
    choice = body.tool_choice
    continues = messages[-1].role == "assistant"  # if so, the answer continues this message
    tools = None if choice is not None and choice.type == "none" else body.tools
    template = TemplateOptions(
        tools=[
            chat.function_tool(tool.name, tool.description, tool.input_schema, tool.strict)
            for tool in tools or ()
        ],
        add_generation_prompt=not continues,
        continue_final_message=continues,
        variables=template_variables(body),
    )
    return Conversation(
        messages=messages,
        template=template,
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        thinking_token_budget=body.thinking.token_budget if body.thinking else None,
    )


def template_variables(body: CountTokensRequest) -> JsonObject:
    """Returns the variables of the chat template. Variables that the client sends explicitly take
    precedence."""
    variables: JsonObject = {}
    if body.thinking is not None:
        variables |= dict.fromkeys(THINKING_VARIABLES, body.thinking.type != "disabled")
        if body.thinking.budget_tokens is not None:
            variables["thinking_budget"] = body.thinking.budget_tokens
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    return {**variables, **(body.chat_template_kwargs or {})}


def _tool_choice(choice: ToolChoice) -> chat.ToolChoice:
    if choice.type == "tool":
        assert choice.name is not None, "the choice was checked"
        return chat.NamedToolChoice(type="function", function=chat.FunctionName(name=choice.name))
    return "required" if choice.type == "any" else choice.type


def chat_messages(body: CountTokensRequest) -> list[chat.ChatMessage]:
    """Returns the messages, the system message first. A message with tool results becomes one
    message of role `tool` for each result, in order, and then a user message with its text."""
    said: list[chat.ChatMessage] = []
    if body.system:
        said.append(chat.ChatMessage(role="system", content=text_of(body.system)))
    for role, row in groupby(_converted(body.messages), key=attrgetter("role")):
        if role in _MERGED_ROLES:
            said.append(_merge_adjacent(list(row)))
        else:
            said.extend(row)
    return said


def _converted(messages: list[InputMessage]) -> Iterator[chat.ChatMessage]:
    called: dict[str, str] = {}
    """The names of the tools that earlier messages called, by call id."""
    for message in messages:
        blocks = message.blocks
        text = text_of(blocks)
        if message.role == "system":
            yield chat.ChatMessage(role="system", content=text)
        elif message.role == "assistant":
            thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
            calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
            called |= {call.id: call.name for call in calls}
            yield chat.ChatMessage(
                role="assistant",
                content=text,
                reasoning_content="\n".join(thoughts) or None,
                tool_calls=list(map(_call, calls)) or None,
            )
        else:
            results = [block for block in blocks if isinstance(block, ToolResultBlock)]
            for block in results:
                yield chat.ChatMessage(
                    role="tool",
                    content=block.text,
                    tool_call_id=call_id(block.tool_use_id),
                    name=called[block.tool_use_id],
                )
            if not results or any(isinstance(block, TextBlock) for block in blocks):
                yield chat.ChatMessage(role="user", content=text)


def _call(block: ToolUseBlock) -> chat.MessageToolCall:
    arguments = bytes(block.input).decode()
    return chat.MessageToolCall(
        id=call_id(block.id), function=chat.FunctionCall(name=block.name, arguments=arguments)
    )


def _merge_adjacent(row: list[chat.ChatMessage]) -> chat.ChatMessage:
    """Merges messages of one role; their texts are joined by line breaks."""
    if len(row) == 1:
        return row[0]
    return chat.ChatMessage(
        role=row[0].role,
        content="\n".join(filter(None, (one.text for one in row))),
        reasoning_content="\n".join(filter(None, (one.reasoning_content for one in row))) or None,
        tool_calls=[call for one in row for call in one.tool_calls or ()] or None,
    )
