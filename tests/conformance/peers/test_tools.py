"""Tool calls: after vLLM's tests of tool use and function calling, and SGLang's of function calls
and tool choice. nano was not trained to call tools, so every call here is forced by its grammar."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.conformance.in_process_server import MODEL
from tests.conformance.peers.conftest import Post
from tests.conformance.peers.requests import (
    ANSWERED,
    CALL,
    CHAT,
    FORM,
    NAMED,
    SEARCH,
    UPPER,
    WEATHER,
    choices,
    events,
    ok,
    refused,
)

pytestmark = pytest.mark.slow

QUERY = {"messages": [{"role": "user", "content": "weather?"}], "max_tokens": 250}
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
CALLS = {"logit_bias": {str(ord("<")): 100}, "structured_outputs": {"choice": ["no"]}}
"""Parameters to go with tools: the answer is a call or `no`, and nano is made to prefer the call's
first byte."""
STREAMED = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def calls_of(answer: Any, stream: bool) -> tuple[list[Any], list[str], str]:
    """Returns the calls of one answer, its finish reasons, and its text."""
    if not stream:
        (choice,) = ok(answer)["choices"]
        message = choice["message"]
        return message.get("tool_calls") or [], [choice["finish_reason"]], message["content"] or ""
    calls: list[Any] = []
    reasons, text = [], ""
    for choice in choices(events(answer)):
        delta = choice["delta"]
        text += delta.get("content") or ""
        for part in delta.get("tool_calls") or ():
            if part["index"] == len(calls):
                assert part["id"] and part["function"]["name"] and part["type"] == "function"
                calls.append({"id": part["id"], "function": {**part["function"]}})
                calls[-1]["function"].setdefault("arguments", "")
            else:
                assert part["index"] == len(calls) - 1
                assert not part.get("id") and not part["function"].get("name")
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
        if choice["finish_reason"]:
            reasons.append(choice["finish_reason"])
    return calls, reasons, text


@STREAMED
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call(post: Post, choice: Any, stream: bool) -> None:
    """vLLM test_completion_with_function_calling.py::test_function_tool_use, test_named_tool_use;
    SGLang test_tool_choice.py::test_tool_choice_required_*, test_tool_choice_specific_function_*"""
    answer = post(CHAT, **QUERY, tools=[WEATHER], tool_choice=choice, stream=stream)
    calls, reasons, text = calls_of(answer, stream)
    assert len(calls) >= 1 and text == ""
    for call in calls:
        assert call["function"]["name"] == "get_weather" and len(call["id"]) >= 9
        jsonschema.validate(json.loads(call["function"]["arguments"]), FORM)
    assert reasons == ["tool_calls"] or (choice == NAMED and reasons == ["stop"])


def test_a_streamed_call_equals_the_whole_one(post: Post) -> None:
    """vLLM test_tool_calls.py::test_tool_call_and_choice"""
    body = {**QUERY, "tools": [WEATHER, SEARCH], "tool_choice": "required"}
    whole, streamed = (calls_of(post(CHAT, **body, stream=one), one) for one in (False, True))
    assert [one["function"] for one in whole[0]] == [one["function"] for one in streamed[0]]
    assert whole[1] == streamed[1] == ["tool_calls"]


def test_one_of_two_is_named(post: Post) -> None:
    """SGLang test_openai_function_calling.py::test_function_call_specific"""
    body = {**QUERY, "tools": [SEARCH, WEATHER], "tool_choice": NAMED}
    calls, _, _ = calls_of(post(CHAT, **body), False)
    assert {call["function"]["name"] for call in calls} == {"get_weather"}


@STREAMED
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_no_parallel_calls(post: Post, stream: bool, choice: str) -> None:
    """vLLM test_parallel_tool_calls.py::test_parallel_tool_calls_false; SGLang
    test_parallel_tool_calls.py"""
    body = {**QUERY, "tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    calls, _, _ = calls_of(post(CHAT, **body, **CALLS, stream=stream), stream)
    assert len(calls) == 1


def test_parallel_calls(post: Post) -> None:
    """vLLM test_parallel_tool_calls.py::test_parallel_tool_calls: each has a unique id"""
    bias = {str(ord("<")): 100, str(ord("\n")): 99}
    body = {**QUERY, "max_tokens": 400, "tools": [SEARCH], "tool_choice": "required"}
    calls, _, _ = calls_of(post(CHAT, **body, logit_bias=bias), False)
    ids = [call["id"] for call in calls]
    assert len(set(ids)) == len(ids) >= 1


@STREAMED
def test_a_strict_tool(post: Post, stream: bool) -> None:
    """SGLang test_openai_function_calling.py::test_function_call_strict,
    test_function_calling_streaming_args_parsing"""
    body = {**QUERY, "tools": [STRICT], "parallel_tool_calls": False}
    (call,), reasons, _ = calls_of(post(CHAT, **body, **CALLS, stream=stream), stream)
    assert reasons == ["tool_calls"]
    jsonschema.validate(json.loads(call["function"]["arguments"]), FORM)


@STREAMED
@pytest.mark.parametrize("choice", ["auto", None])
def test_a_choice(post: Post, stream: bool, choice: str | None) -> None:
    """vLLM test_chat_completions.py::test_chat_completion_with_tools; SGLang
    test_tool_choice.py::test_tool_choice_auto_*: nano answers with text"""
    body = {"messages": UPPER, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 40}
    calls, reasons, text = calls_of(post(CHAT, **body, stream=stream), stream)
    assert (calls or text) and len(reasons) == 1


@STREAMED
def test_no_choice(post: Post, stream: bool) -> None:
    """vLLM test_chat_completions.py::test_chat_completion_without_tools; SGLang
    test_tool_choice.py: `none` never calls"""
    body = {**QUERY, "tools": [STRICT], "tool_choice": "none", "max_tokens": 40}
    answer = post(CHAT, **body, logit_bias={str(ord("<")): 100}, stream=stream)
    calls, reasons, text = calls_of(answer, stream)
    assert calls == [] and text and reasons == ["length"]


@STREAMED
def test_tools_of_an_empty_list(post: Post, stream: bool) -> None:
    """vLLM test_chat_completion_request_validations.py::
    test_chat_completion_request_with_no_tools: absent, null and empty are the same here"""
    for tools in (None, []):
        answer = post(CHAT, messages=UPPER, tools=tools, stream=stream)
        assert calls_of(answer, stream)[2] == "ABC"


@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
@pytest.mark.parametrize("tools", [None, []])
def test_a_choice_without_tools(post: Post, choice: Any, tools: Any) -> None:
    """vLLM test_chat_completion_request_validations.py::
    test_chat_completion_request_with_tool_choice_but_no_tools"""
    body = {"messages": UPPER, "tool_choice": choice, "tools": tools}
    if choice == "auto":
        assert calls_of(post(CHAT, **body), False)[2] == "ABC"  # without a constraint
    else:
        assert refused(post(CHAT, **body))["param"].startswith("tool_choice")


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "nothing_of_this_name"}},
        {},
        "bogus",
        123,
        {"type": "function", "function": {}},
        {"type": "function", "function": {"name": ""}},
    ],
)
def test_invalid_tool_choices_are_refused(post: Post, choice: Any) -> None:
    """vLLM test_completion_with_function_calling.py::test_inconsistent_tool_choice_and_tools,
    test_tool_choice_null.py::test_invalid_tool_choice_is_still_rejected; SGLang
    test_protocol.py::test_invalid_tool_choice_type"""
    refused(post(CHAT, **QUERY, tools=[WEATHER], tool_choice=choice))


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "a b", "parameters": FORM}},
        {"type": "function", "function": {"name": "", "parameters": FORM}},
        {"type": "function", "function": {"name": "a", "parameters": {"type": "int"}}},
        {"type": "function"},
        {"function": 3},
        "get_weather",
    ],
)
def test_invalid_tools_are_refused(post: Post, tool: Any) -> None:
    """vLLM protocol; SGLang test_openai_function_calling.py: a tool that cannot be forced"""
    refused(post(CHAT, **QUERY, tools=[tool], tool_choice="required"))


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@STREAMED
@pytest.mark.parametrize("limit", [1, 20, 60])
def test_a_call_that_is_cut_off(post: Post, choice: Any, stream: bool, limit: int) -> None:
    """vLLM test_completion_with_function_calling.py::test_max_tokens_with_tool_choice_required:
    markup never appears as text"""
    body = {**QUERY, "max_tokens": limit, "tools": [WEATHER], "tool_choice": choice}
    calls, reasons, text = calls_of(post(CHAT, **body, stream=stream), stream)
    assert reasons == ["length"] and text == ""
    assert limit > 1 or calls == []


@pytest.mark.parametrize("arguments", ["{}", "", '{"city": "Par'])
def test_calls_are_accepted_as_history(post: Post, arguments: str) -> None:
    """vLLM test_completion_with_function_calling.py::test_no_args_tool_call; a truncated call is
    accepted as it was returned"""
    call = CALL | {"function": {"name": "get_weather", "arguments": arguments}}
    turns = [ANSWERED[0], ANSWERED[1] | {"tool_calls": [call]}, ANSWERED[2]]
    ok(post(CHAT, messages=turns, tools=[WEATHER], max_tokens=4))


@STREAMED
def test_results_are_accepted_as_history(post: Post, stream: bool) -> None:
    """vLLM test_tool_calls.py::test_tool_call_with_results"""
    answer = post(CHAT, messages=ANSWERED, tools=[WEATHER], max_tokens=12, stream=stream)
    _, reasons, _ = calls_of(answer, stream)
    assert len(reasons) == 1


def test_a_result_names_its_tool(post: Post) -> None:
    """SGLang test_openai_function_calling.py::test_function_calling_multiturn"""
    ok(post(CHAT, messages=[*ANSWERED[:2], ANSWERED[2] | {"name": "get_weather"}], max_tokens=4))


def test_a_message_of_the_client_is_accepted_as_history(client: openai.OpenAI) -> None:
    """vLLM test_completion_with_function_calling.py: the client's own object, with all its null
    fields"""
    options: dict[str, Any] = {"model": MODEL, "tools": [WEATHER], "temperature": 0}
    turns: list[Any] = [*QUERY["messages"]]  # type: ignore[misc]
    first = client.chat.completions.create(
        messages=turns, tool_choice="required", parallel_tool_calls=False, **options
    )
    message = first.choices[0].message
    assert message.tool_calls
    turns += [
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "20"},
    ]
    assert client.chat.completions.create(messages=turns, max_tokens=4, **options)
    turns[1] = message.model_dump()
    assert client.chat.completions.create(messages=turns, max_tokens=4, **options)


def test_parsed_calls_are_accepted_as_history(client: openai.OpenAI) -> None:
    """OpenAI's `parse`: strict tools, with `parsed_arguments` in its result"""
    from pydantic import BaseModel

    class Look(BaseModel):
        deep: bool

    tool = openai.pydantic_function_tool(Look, name="search")
    turns: list[Any] = [{"role": "user", "content": "look"}]
    answer = client.chat.completions.parse(
        model=MODEL, messages=turns, tools=[tool], tool_choice="required", temperature=0
    )
    message = answer.choices[0].message
    assert message.tool_calls
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Look)
    turns += [message.model_dump()]
    turns += [
        {"role": "tool", "tool_call_id": call.id, "content": "x"} for call in message.tool_calls
    ]
    assert client.chat.completions.create(model=MODEL, messages=turns, max_tokens=4)


@pytest.mark.parametrize("place", ["tool", "function", "parameters"])
def test_more_in_a_tool(post: Post, place: str) -> None:
    """vLLM test_completion_with_function_calling.py: `strict` inside `parameters`, and next to
    `function`"""
    tool = json.loads(json.dumps(WEATHER))
    where = {"tool": tool, "function": tool["function"], "parameters": tool["function"]}[place]
    where = where["parameters"] if place == "parameters" else where
    where |= {"strict": True, "returns": {"type": "string"}} if place != "parameters" else {}
    where.setdefault("title", "x") if place == "parameters" else None
    calls, _, _ = calls_of(post(CHAT, **QUERY, tools=[tool], tool_choice="required"), False)
    assert calls


def test_allowed_tools(post: Post) -> None:
    """OpenAI's `allowed_tools`, which vLLM's protocol accepts: a subset of the given tools"""
    some = {"mode": "required", "tools": [NAMED]}
    choice = {"type": "allowed_tools", "allowed_tools": some}
    calls, _, _ = calls_of(post(CHAT, **QUERY, tools=[SEARCH, WEATHER], tool_choice=choice), False)
    assert {call["function"]["name"] for call in calls} == {"get_weather"}


def test_a_tool_without_parameters(post: Post) -> None:
    """vLLM test_completion_with_function_calling.py::test_no_args_tool_call"""
    for more in ({}, {"parameters": None}, {"parameters": {}}):
        tool = {"type": "function", "function": {"name": "now", **more}}
        body = {**QUERY, "tools": [tool], "tool_choice": "required"}
        calls, _, _ = calls_of(post(CHAT, **body, logit_bias={"125": 100}), False)
        assert json.loads(calls[0]["function"]["arguments"]) == {}


def test_schemas_are_not_changed_by_use(post: Post) -> None:
    """vLLM test_tool_schema_defs_no_mutation.py: the same request again has the same answer"""
    parameters = {
        "type": "object",
        "properties": {"unit": {"$ref": "#/$defs/Unit"}},
        "required": ["unit"],
        "additionalProperties": False,
        "$defs": {"Unit": {"type": "string", "enum": ["c", "f"]}},
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    answers = []
    for _ in range(2):
        calls, _, _ = calls_of(post(CHAT, **QUERY, tools=[tool], tool_choice="required"), False)
        answers.append([call["function"] for call in calls])
    assert answers[0] == answers[1]
    jsonschema.validate(json.loads(answers[0][0]["arguments"]), parameters)
