"""Histories are read tolerantly: SDK objects are accepted when they are sent back with all their
fields. Anything that cannot be served is still refused by name."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import anthropic.types
import msgspec
import pytest
from openai.types.chat import ParsedChatCompletionMessage, ParsedFunctionToolCall
from openai.types.responses import ParsedResponseFunctionToolCall, ParsedResponseOutputMessage
from openai.types.responses.parsed_response import ParsedResponseOutputText
from pydantic import BaseModel

from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.api.messages.convert import chat_messages
from swell.cluster.api.messages.protocol import MessagesRequest
from swell.cluster.api.responses.protocol import ResponsesRequest
from swell.cluster.api.tokenize import TokenizeRequest
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.prompt.chat_template import ChatTemplate, TemplateOptions
from swell.cluster.text.prompt.prompt_processor import PromptProcessor
from swell.cluster.text.schema.decode import read
from swell.cluster.text.schema.known_fields import IGNORED_FIELDS
from swell.cluster.text.schema.request_body import HistoryPart
from tests.cluster.text import tokenizers_for_tests

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "3"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class Answer(BaseModel):
    a: int


def chat(*messages: Any, **fields: Any) -> tuple[ChatCompletionRequest, Counter[str]]:
    body = json.dumps({"messages": [USER, *messages], **fields})
    request, stripped = read(body.encode(), ChatCompletionRequest)
    return request, stripped.ignored


def refusal(*messages: Any, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        chat(*messages, **fields)
    return caught.value


# -------------------------------------------------------------- messages that SDKs send back


def parsed_message() -> dict[str, Any]:
    """A message from `client.chat.completions.parse`, fully dumped."""
    function = {"name": "f", "arguments": '{"a": 1}', "parsed_arguments": Answer(a=1)}
    call = ParsedFunctionToolCall.model_validate({**CALL, "function": function})
    message = ParsedChatCompletionMessage[Answer](
        role="assistant", content='{"a": 1}', parsed=Answer(a=1), tool_calls=[call]
    )
    return message.model_dump(mode="json")


def test_a_dumped_parsed_message_is_accepted() -> None:
    message = parsed_message()
    assert "parsed" in message
    assert "parsed_arguments" in message["tool_calls"][0]["function"]
    request, ignored = chat(message, RESULT)
    assert request.messages[1].text == '{"a": 1}'
    assert request.messages[1].tool_calls[0].function.name == "f"
    assert (ignored["parsed"], ignored["parsed_arguments"]) == (1, 1)


FOREIGN = [
    {"reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
    {"id": "msg_1", "annotations": []},
    {"extra_content": {"google": {"thought_signature": "x"}}},
    {"provider_specific_fields": {"refusal": None}, "thinking_blocks": []},
    {"audio": None, "function_call": None, "tool_calls": None, "refusal": None},
    {"whatever": {"deeply": [[["nested"]]]}, "": 1},
]


@pytest.mark.parametrize("fields", FOREIGN)
def test_fields_of_other_programs_are_ignored_in_a_message(fields: dict[str, Any]) -> None:
    request, ignored = chat({"role": "assistant", "content": "yes", **fields}, USER)
    assert [message.text for message in request.messages] == ["hi", "yes", "hi"]
    known = [name for name in fields if name not in ("audio", "function_call", "tool_calls")]
    assert ignored.total() == len([name for name in known if name != "refusal"])
    assert set(ignored) <= set(IGNORED_FIELDS)


def test_unlisted_names_share_one_label() -> None:
    fields = {f"mine_{n}": n for n in range(50)}
    _, ignored = chat({"role": "user", "content": "a", **fields})
    assert ignored == {"other": 50}


def test_unknown_fields_are_ignored_in_parts_calls_and_tools() -> None:
    part = {"type": "text", "text": "yes", "id": "p", "cache_control": None}
    call = {**CALL, "extra_content": {}, "function": {**CALL["function"], "parsed_arguments": {}}}
    tool = {**TOOL, "strict": True, "function": {**TOOL["function"], "returns": {}}}
    request, ignored = chat(
        {"role": "assistant", "content": [part], "tool_calls": [call]}, RESULT, tools=[tool]
    )
    assert request.messages[1].text == "yes"
    assert request.tools[0].function.strict is None
    assert ignored == Counter(["id", "extra_content", "parsed_arguments", "strict", "returns"])


def test_a_schema_keeps_properties_that_have_such_names() -> None:
    """These are names of properties in a schema, not fields of the API."""
    schema = {"type": "object", "properties": {"parsed": {"type": "string"}, "id": {}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "returns": {}}}
    request, _ = chat(tools=[tool])
    assert request.tools[0].function.parameters == schema


def test_kept_values_are_not_rewritten() -> None:
    text = 'ü "quoted" \\ \u2028 \U0001f600 {"parsed": 1}, [1'
    request, ignored = chat({"role": "user", "content": text, "id": "x"})
    assert (request.messages[1].content, ignored["id"]) == (text, 1)


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": "a", "audio": {"id": "x"}}, "messages[1].audio"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}, "id": "x"}]},
            "messages[1].content[0].type",
        ),
        (
            {"role": "user", "id": "x", "content": [{"type": "text", "text": "", "file": {}}]},
            "messages[1].content[0].file",
        ),
        ({"role": "assistant", "id": "x", "content": 5}, "messages[1].content"),
    ],
)
def test_known_unsupported_content_is_still_refused(message: Any, param: str) -> None:
    assert refusal(message).param == param


def test_a_request_with_a_tolerant_history_is_strict() -> None:
    message = {"role": "user", "content": "a", "id": "x"}
    assert refusal(message, max_token=3).param == "max_token"
    options = {"include_usage": True, "usage": 1}
    assert refusal(message, stream=True, stream_options=options).param == "stream_options.usage"
    choice = {"type": "function", "function": {"name": "f", "strict": True}}
    error = refusal(message, tools=[TOOL], tool_choice=choice)
    assert error.param == "tool_choice.function.strict"


@pytest.mark.parametrize("junk", ["[" * 100_000, '{"a":' * 20_000, "[" * 20_000 + "]" * 20_000])
def test_ignored_fields_have_the_common_bounds(junk: str) -> None:
    body = '{"messages":[{"role":"user","content":"a","mine":' + junk + "}]}"
    with pytest.raises(BadRequest, match="JSON"):
        read(body.encode(), ChatCompletionRequest)


def test_messages_of_python_callers_are_read_in_the_same_way() -> None:
    prompts = PromptProcessor(tokenizers_for_tests.chat_tokenizer(), 99, 500, "m")
    messages = prompts.chat_messages([USER, parsed_message()])
    assert messages[1].tool_calls is not None
    with pytest.raises(BadRequest) as caught:
        prompts.chat_messages([{"role": "assistant", "content": "a", "audio": {"id": "x"}}])
    assert caught.value.param == "messages[0].audio"


def test_tokenize_reads_the_same_history() -> None:
    body = json.dumps({"messages": [USER, parsed_message()], "tools": [{**TOOL, "strict": True}]})
    _, stripped = read(body.encode(), TokenizeRequest)
    assert stripped.ignored["parsed"] == 1


# ----------------------------------------------------------------------------- responses


def parsed_items() -> list[dict[str, Any]]:
    """Items from `client.responses.parse`, fully dumped."""
    text = ParsedResponseOutputText[Answer](
        type="output_text", text='{"a": 1}', annotations=[], parsed=Answer(a=1)
    )
    message = ParsedResponseOutputMessage[Answer](
        id="m", type="message", role="assistant", status="completed", content=[text]
    )
    call = ParsedResponseFunctionToolCall(
        id="fc", type="function_call", call_id="c1", name="f", arguments='{"a": 1}',
        parsed_arguments=Answer(a=1),
    )  # fmt: skip
    return [message.model_dump(mode="json"), call.model_dump(mode="json")]


def test_dumped_parsed_items_are_accepted() -> None:
    items = parsed_items()
    assert "parsed" in items[0]["content"][0]
    assert "parsed_arguments" in items[1]
    output = {"type": "function_call_output", "call_id": "c1", "output": "3", "created_at": 1}
    tool = {"type": "function", "name": "f", "parameters": {}, "strict": True, "returns": {}}
    body = {"input": [{**USER, "id": "x"}, *items, output], "tools": [tool]}
    request, stripped = read(json.dumps(body).encode(), ResponsesRequest)
    assert [type(item).__name__ for item in request.items()] == [
        "MessageItem",
        "MessageItem",
        "FunctionCallItem",
        "FunctionCallOutputItem",
    ]
    assert request.function_tools()[0].name == "f"
    ignored = stripped.ignored
    assert ignored["parsed"] == ignored["parsed_arguments"] == ignored["returns"] == 1


# ----------------------------------------------------------------------------- Anthropic


def test_a_dumped_message_of_anthropics_client_is_accepted() -> None:
    message = anthropic.types.Message(
        id="m",
        type="message",
        role="assistant",
        model="x",
        content=[
            anthropic.types.ThinkingBlock(type="thinking", thinking="hm", signature="s"),
            anthropic.types.TextBlock(type="text", text="yes"),
            anthropic.types.ToolUseBlock(type="tool_use", id="t1", name="f", input={"a": 1}),
        ],
        usage=anthropic.types.Usage(input_tokens=1, output_tokens=2),
    )
    whole = message.model_dump(mode="json")
    whole["content"][1]["provider"] = "x"
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "3", "is_error": False}
    follow = {"role": "user", "content": [{**result, "timestamp": 5}]}
    tool = {"name": "f", "input_schema": {"type": "object"}, "returns": {}}
    body = {"messages": [USER, whole, follow], "max_tokens": 9, "tools": [tool]}
    request, stripped = read(json.dumps(body).encode(), MessagesRequest)
    messages = chat_messages(request)
    assert [one.role for one in messages] == ["user", "assistant", "tool"]
    assert (messages[1].text, messages[1].reasoning_content) == ("yes", "hm")
    ignored = stripped.ignored
    assert ignored["id"] == ignored["usage"] == ignored["returns"] == ignored["timestamp"] == 1
    assert ignored["other"] >= 1


# --------------------------------------------------------------- contents of messages


def template(text: str | None = None) -> ChatTemplate:
    return ChatTemplate(tokenizers_for_tests.chat_tokenizer(), "m", text)


def shown(message: dict[str, Any]) -> dict[str, Any]:
    """Returns the last message as the template receives it."""
    request, _ = chat(message)
    return template()._message_dicts(request.messages, TemplateOptions())[-1]


def test_vllms_field_reasoning_means_reasoning_content() -> None:
    answer = {"role": "assistant", "content": "yes"}
    assert shown({**answer, "reasoning": "hm"})["reasoning_content"] == "hm"
    assert (
        shown({**answer, "reasoning": "no", "reasoning_content": "hm"})["reasoning_content"] == "hm"
    )
    assert "reasoning_content" not in shown({**answer, "reasoning": {"effort": "low"}})


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        ('{"a": 1, "b": "unfinis', {"a": 1}),
        ('{"a": [1, {"b": 2}, 3', {"a": [1, {"b": 2}]}),
        ("I would call", {}),
        ("[1, 2]", {}),
        ('{"a": 1e999, "b": "kept"}', {"a": sys.float_info.max, "b": "kept"}),
    ],
)
def test_cut_off_arguments_become_their_longest_object(written: str, seen: Any) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": written}}
    message = shown({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": seen}


def test_the_older_form_of_calls_is_converted_to_the_newer() -> None:
    called = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    result = {"role": "function", "name": "f", "content": "3"}
    request, _ = chat(called, result)
    call = request.messages[1].tool_calls[0]
    assert (call.function.name, call.function.arguments) == ("f", '{"a": 1}')
    assert (request.messages[2].role, request.messages[2].tool_call_id) == ("tool", call.id)
    assert len(call.id) == 9 and call.id.isalnum()
    assert refusal(result).param == "messages[1].name"
    assert refusal({**called, "tool_calls": [CALL]}).param == "messages[1].function_call"


def test_a_message_of_the_assistant_may_be_empty() -> None:
    assert shown({"role": "assistant", "content": None})["content"] == ""
    assert shown({"role": "assistant"})["content"] == ""
    assert shown({"role": "user", "content": ""})["content"] == ""


def test_a_tool_may_answer_in_parts() -> None:
    parts = [{"type": "text", "text": "3"}, {"type": "output_text", "text": "4"}]
    call = {"role": "assistant", "tool_calls": [CALL]}
    request, _ = chat(call, {**RESULT, "content": parts})
    assert request.messages[2].text == "3\n4"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({**RESULT, "tool_call_id": ""}, "messages[1].tool_call_id"),
        ({"role": "assistant", "tool_calls": [{**CALL, "id": ""}]}, "messages[1].tool_calls[0].id"),
        (
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "", "arguments": "{}"}}],
            },
            "messages[1].tool_calls[0].function.name",
        ),
        (
            {"role": "assistant", "function_call": {"name": "", "arguments": ""}},
            "messages[1].function_call.name",
        ),
    ],
)
def test_empty_ids_and_names_are_refused(message: dict[str, Any], param: str) -> None:
    error = refusal(message)
    assert error.param == param
    assert "empty" in error.message


@pytest.mark.parametrize("field", ["id", "name"])
def test_empty_ids_and_names_are_refused_in_blocks(field: str) -> None:
    block = {"type": "tool_use", "id": "t1", "name": "f", "input": {}, field: ""}
    body = {"max_tokens": 5, "messages": [USER, {"role": "assistant", "content": [block]}, USER]}
    with pytest.raises(BadRequest, match="empty") as caught:
        read(json.dumps(body).encode(), MessagesRequest)
    assert caught.value.param == f"messages[1].content[0].{field}"


# ------------------------------------------------------------------------------ roles

CHATML = tokenizers_for_tests.CHAT_TEMPLATE
SILENT = (
    "{% for m in messages %}{% if m['role'] in ['user', 'assistant'] %}"
    "[{{ m['role'] }}]{{ m['content'] }}{% endif %}{% endfor %}"
)
LOUD = SILENT.replace("{% endif %}", "{% else %}{{ raise_exception('no such role') }}{% endif %}")
CRITIC = {"role": "critic", "content": "too long"}


def test_a_role_that_the_template_defines_is_rendered() -> None:
    request, _ = chat(CRITIC, USER)
    assert "<|im_start|>critic\ntoo long" in template(CHATML).render(
        request.messages, TemplateOptions()
    )


@pytest.mark.parametrize(("text", "param"), [(SILENT, "messages[1].role"), (LOUD, "messages")])
def test_a_role_unknown_to_the_template_is_refused(text: str, param: str) -> None:
    request, _ = chat(CRITIC, USER)
    with pytest.raises(BadRequest, match=r"critic|no such role") as caught:
        template(text).render(request.messages, TemplateOptions())
    assert caught.value.param == param


def test_custom_roles_are_bounded_in_number_and_length() -> None:
    many = [{"role": f"r{n}", "content": "x"} for n in range(9)]
    assert refusal(*many).param == "messages"
    assert refusal({"role": "r" * 65, "content": "x"}).param == "messages[1].role"


def test_every_part_of_a_history_is_tolerant() -> None:
    names = {kind.__name__ for kind in _below(HistoryPart)}
    assert {"ChatMessage", "InputMessage", "TextBlock", "FunctionTool", "InputReasoning"} <= names


def _below(kind: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    return [one for sub in kind.__subclasses__() for one in (sub, *_below(sub))]
