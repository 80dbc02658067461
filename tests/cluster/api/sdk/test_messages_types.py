"""Requests of Anthropic's API, their common form, and the inputs of tool calls in answers."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jiter import from_json

from swell.cluster.api.messages.content import blocks
from swell.cluster.api.messages.convert import chat_messages, conversation, to_generation_request
from swell.cluster.api.messages.protocol import CountTokensRequest, MessagesRequest
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.parsers import deltas
from swell.cluster.text.partial_arguments import (
    MAX_DEPTH,
    PartialObject,
    partial_object_json,
    read_partial_object,
)
from swell.cluster.text.prompt.generation_request import Conversation
from swell.cluster.text.schema.decode import decode
from swell.cluster.text.schema.json_size import MAX_NUMBER_CHARS

QUESTION = [{"role": "user", "content": "2 + 2?"}]
ADD = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {}}}}


def payload(kind: type[Any] = MessagesRequest, **fields: object) -> Any:
    limit = {"max_tokens": 9} if kind is MessagesRequest else {}
    body = {"model": "fake", "messages": QUESTION, **limit, **fields}
    return decode(json.dumps(body).encode(), kind)


# ------------------------------------------------------------------------- inputs of tool calls

_JSON_BITS = [*'{}[]:," \n1-.é\\', '"a":', '{"b"', "true", "nul", "2e5", "\\ud83d", "\\u00e9", "x"]


@settings(deadline=None)
@given(st.lists(st.sampled_from(_JSON_BITS), max_size=25), st.integers(1, 5))
def test_a_tool_input_equals_the_partial_json_of_the_stream(bits: list[str], step: int) -> None:
    text = '{"' + "".join(bits)
    reader = PartialObject()
    given = "".join(reader.push(text[at : at + step]) for at in range(0, len(text), step))
    assert from_json(given.encode(), partial_mode=True) == read_partial_object(text)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner | st.text()),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(), _VALUES), st.booleans())
def test_an_object_keeps_its_values(value: dict[str, Any], ascii: bool) -> None:
    assert read_partial_object(json.dumps(value, ensure_ascii=ascii, indent=1)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", {}),
        ("[1]", {}),
        ("nonsense", {}),
        ('{"a": 1, "b": tru', {"a": 1}),
        ('{"a": 1, "b": nope, "c": 2}', {"a": 1}),
        ('{"a": [1, 02, NaN], "c": 2}', {"a": [1]}),
        ('{"a": 01e9}', {}),
        ('{"a": ' + "1" * (MAX_NUMBER_CHARS + 1) + "}", {}),
        ('{"a": 12345678901234567890, "b": 1.50}', {"a": 12345678901234567890, "b": 1.5}),
        ('{"a": [1, {"b": "x"}, 23', {"a": [1, {"b": "x"}]}),
        ('{"a": 1 oops, "b": 2}', {"a": 1}),
        ('{"a": "two\nlines and \\d"} tail', {"a": "two\nlines and \\d"}),
    ],
)
def test_invalid_arguments_become_their_longest_valid_object(text: str, value: object) -> None:
    assert read_partial_object(text) == value


_NUMBER = r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,20})?([eE][-+]?[0-9]{1,6})?"


@settings(deadline=None, max_examples=40)
@given(
    st.from_regex(_NUMBER, fullmatch=True, alphabet=st.sampled_from("0123456789.eE+-")),
    st.integers(1, 5),
)
@example("1e999", 1)
@example("806e+344450", 3)
@example("-1e400", 2)
def test_a_number_keeps_its_digits(number: str, step: int) -> None:
    """This includes numbers that a double cannot hold, and the text after them."""
    text = f'{{"a": {number}, "b": [{number}, "x"], "c": 1}}'
    reader = PartialObject()
    given = "".join(reader.push(text[at : at + step]) for at in range(0, len(text), step))
    assert given == text == partial_object_json(text)
    calls = [deltas.ToolCall(0, "c", "f"), deltas.Arguments(0, text)]
    (block,) = json.loads(msgspec.json.encode(blocks(calls, hides_thinking=False)))
    assert block["input"] == json.loads(text)
    value = read_partial_object(text)
    assert value["a"] == value["b"][0] and value["b"][1] == "x" and value["c"] == 1
    assert math.isfinite(value["a"])


_CALL_BEGINS = (
    b'{"model": "m", "max_tokens": 5, "messages": [{"role": "assistant", "content": '
    b'[{"type": "text", "text": "' + b"x" * 9000 + b'"}, '
    b'{"type": "tool_use", "id": "t1", "name": "f", "input": '
)
_CALL_ENDS = b'}]}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]}]}'


@given(st.from_regex(_NUMBER, fullmatch=True, alphabet=st.sampled_from("0123456789.eE+-")))
@example("1e999")
@example("-1e400")
@example("9" * 128)
@example("9" * 129)
@example("[" * 99 + "1" + "]" * 99)
@example('"a\\u0000b"')
def test_an_input_can_be_sent_back(value: str) -> None:
    """This includes numbers that a double cannot hold, in a body of any length."""
    calls = [deltas.ToolCall(0, "c", "f"), deltas.Arguments(0, f'{{"a": {value}}}')]
    (block,) = blocks(calls, hides_thinking=False)
    written = msgspec.json.encode(block.input)
    body = decode(_CALL_BEGINS + written + _CALL_ENDS, MessagesRequest)
    (call,) = chat_messages(body)[0].tool_calls or ()
    assert read_partial_object(call.function.arguments) == read_partial_object(written.decode())


@pytest.mark.parametrize(
    "written",
    [b'"x"', b"5", b"[1]", b"null", b"1e999", b'{"a": 1e}', b'{"a": "\\ud800"}', b'{"\xff": 1}'],
)
def test_an_input_must_be_an_object(written: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        decode(_CALL_BEGINS + written + _CALL_ENDS, MessagesRequest)
    at = caught.value.param
    assert at is None or at.startswith("messages[0].content[1].input")
    assert caught.value.code in ("invalid_type", "invalid_json")


def test_the_depth_of_an_input_is_bounded() -> None:
    deep = '{"a":' * (2 * MAX_DEPTH)
    assert msgspec.json.encode(read_partial_object(deep)).count(b"{") == MAX_DEPTH


# ------------------------------------------------------------------------------- the conversation

_CALL = {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": [1, "é"]}}
_RESULT = {"type": "tool_result", "tool_use_id": "t1"}


def test_a_conversation_with_tools_in_the_common_form() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    hidden = {"type": "redacted_thinking", "data": "?"}
    text = {"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}
    body = payload(
        system=[{"type": "text", "text": "Be kind."}, {"type": "text", "text": "Be brief."}],
        messages=[
            *QUESTION,
            {"role": "assistant", "content": [thought, hidden, text, _CALL, _CALL | {"id": "t2"}]},
            {
                "role": "user",
                "content": [
                    {**_RESULT, "content": [{"type": "text", "text": "4"}]},
                    {**_RESULT, "tool_use_id": "t2", "content": "no", "is_error": True},
                    {"type": "text", "text": "And?"},
                ],
            },
            {"role": "user", "content": "Well?"},
        ],
    )
    plain = [
        {name: value for name, value in msgspec.to_builtins(one).items() if value is not None}
        for one in chat_messages(body)
    ]
    for call in plain[2]["tool_calls"]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    function = {"name": "add", "arguments": {"a": [1, "é"]}}
    assert plain == [
        {"role": "system", "content": "Be kind.\nBe brief."},
        {"role": "user", "content": "2 + 2?"},
        {
            "role": "assistant",
            "content": "Look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": id, "type": "function", "function": function, "index": None}
                for id in ("t1", "t2")
            ],
        },
        {"role": "tool", "content": "4", "tool_call_id": "t1", "name": "add"},
        {"role": "tool", "content": "Error: no", "tool_call_id": "t2", "name": "add"},
        {"role": "user", "content": "And?\nWell?"},
    ]


@pytest.mark.parametrize(
    ("choice", "name", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", True),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}, True),
    ],
)
def test_tool_choices_are_converted(choice: object, name: object, parallel: object) -> None:
    body = payload(tools=[{**ADD, "type": "custom", "strict": True}], tool_choice=choice)
    chat = conversation(body)
    assert msgspec.to_builtins(chat.tool_choice) == name
    assert chat.parallel_tool_calls is parallel
    tools = chat.template.tools
    assert bool(tools) == (name != "none")
    for tool in tools:
        assert tool.function is not None and tool.function.strict
        assert tool.function.parameters == ADD["input_schema"]


def test_request_fields_reach_sampling_and_template() -> None:
    schema = {"type": "object"}
    body = payload(
        max_tokens=5000,
        temperature=0.5,
        top_p=0.9,
        top_k=3,
        stop_sequences=["a", "b"],
        thinking={"type": "enabled", "budget_tokens": 2000},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": schema}},
    )
    request = to_generation_request(body, {"top_k": 9, "min_p": 0.25})
    params = request.params
    assert params.min_p == 0.25
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 3)
    assert params.stop == ["a", "b"] and params.max_tokens is None
    assert request.max_tokens_in_context == 5000
    assert params.structured_outputs is not None and params.structured_outputs.json == schema
    expected = {"enable_thinking": True, "thinking": True}
    expected |= {"thinking_budget": 2000, "reasoning_effort": "low"}
    assert isinstance(request.prompt, Conversation)
    assert request.prompt.template.variables == expected == conversation(body).template.variables
    off = conversation(payload(thinking={"type": "disabled"}, chat_template_kwargs={"x": 1}))
    assert off.template.variables == {"enable_thinking": False, "thinking": False, "x": 1}


def test_an_answer_continues_the_last_message_of_the_assistant() -> None:
    prefill = [*QUESTION, {"role": "assistant", "content": "It is"}]
    for kind in (MessagesRequest, CountTokensRequest):
        assert conversation(payload(kind, messages=prefill)).template.continue_final_message is True
        assert conversation(payload(kind)).template.continue_final_message is False


def _content(*blocks: object, role: str = "user") -> dict[str, object]:
    return {"messages": [*QUESTION, {"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (_content({"type": "image", "source": {}}), "messages[1].content[0].type"),
        (_content({"type": "document", "source": {}}), "messages[1].content[0].type"),
        (_content({"type": "poem"}), "messages[1].content[0].type"),
        (_content({"type": "text", "txt": "a"}), "messages[1].content[0].text"),
        (_content(_CALL), "messages[1].content[0].type"),
        (_content(_CALL, role="assistant"), "messages[1].content[0]"),
        (_content(_RESULT), "messages[1].content[0].tool_use_id"),
        (
            _content({**_RESULT, "content": [{"type": "image", "source": {}}]}),
            "messages[1].content[0].content[0].type",
        ),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "w", "max_uses": 1}]}, "tools[0].type"),
        ({"tools": [{"name": "add"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "add", "input_schema": {}}]}, "tools[0].input_schema.type"),
        ({"tools": [ADD, ADD]}, "tools[1].name"),
        ({"tools": [{**ADD, "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ],
)
def test_unsupported_content_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        payload(**fields)
    assert caught.value.param == param
    assert param in caught.value.message


def test_tools_and_a_response_format_in_one_request() -> None:
    schema = {"type": "object", "properties": {}}
    config = {"format": {"type": "json_schema", "schema": schema}}
    body = payload(tools=[{**ADD, "type": "custom"}], output_config=config)
    request = to_generation_request(body, {})
    assert request.params.structured_outputs is not None
    assert request.params.structured_outputs.json == schema
    assert request.structured_outputs_field == "output_config.format.schema"


@pytest.mark.parametrize(
    ("thinking", "budget"),
    [
        (None, None),
        ({"type": "enabled", "budget_tokens": 1024}, 1024),
        ({"type": "disabled"}, 0),
        ({"type": "adaptive"}, None),
    ],
)
def test_budgets_of_thinking(thinking: object, budget: int | None) -> None:
    assert conversation(payload(thinking=thinking, max_tokens=2000)).thinking_token_budget == budget
