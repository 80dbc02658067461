"""`/v1/responses`: after vLLM's responses tests and SGLang's."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.conformance.in_process_server import MODEL
from tests.conformance.peers.conftest import Post
from tests.conformance.peers.requests import FORM, RESPONSES, ok, refused

pytestmark = pytest.mark.slow

TOOL = {"type": "function", "name": "get_weather", "description": "x", "parameters": FORM}
NAMED = {"type": "function", "name": "get_weather"}
ENDS = {
    "response.completed": "response.created",
    "response.output_item.done": "response.output_item.added",
    "response.output_text.done": "response.output_text.delta",
    "response.content_part.done": "response.content_part.added",
    "response.function_call_arguments.done": "response.function_call_arguments.delta",
}


def text_of(answer: Any) -> str:
    text: str = answer["output"][-1]["content"][0]["text"]
    return text


def test_response(post: Post) -> None:
    """SGLang test_openai_server.py::test_response"""
    answer = ok(post(RESPONSES, input="upper: abc", max_output_tokens=32))
    assert answer["id"] and answer["object"] == "response" and answer["created_at"]
    assert answer["status"] == "completed" and answer["error"] is None
    assert answer["incomplete_details"] is None and text_of(answer) == "ABC"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert answer["text"]["format"]["type"] == "text"


@pytest.mark.parametrize(
    "more",
    [
        {"instructions": "Be brief."},
        {"temperature": 0.5, "top_p": 0.9},
        {"store": True},
        {"store": False},
        {"parallel_tool_calls": True},
        {"tool_choice": "auto"},
        {"truncation": "disabled"},
        {"truncation": "auto"},
        {"user": "me"},
        {"metadata": {"a": "b"}},
        {"frequency_penalty": 1.0},
        {"text": {"format": {"type": "text"}}},
        {"text": {"verbosity": "low"}},
        {"reasoning": None},
        {"service_tier": "auto"},
        {"include": []},
        {"max_tool_calls": None},
        {"prompt_cache_key": "x"},
        {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
        {"previous_response_id": None},
        {"background": False},
        {"stream": False},
        {"chat_template_kwargs": {"a": 1}},
    ],
)
def test_fields(post: Post, more: dict[str, Any]) -> None:
    """SGLang test_openai_server.py::run_response, test_penalty; vLLM test_protocol.py"""
    answer = ok(post(RESPONSES, input="upper: abc", max_output_tokens=32, **more))
    assert answer["status"] in ("completed", "incomplete")


def test_events(client: openai.OpenAI) -> None:
    """SGLang test_openai_server.py::test_response_stream"""
    with client.responses.stream(model=MODEL, input="upper: abc", temperature=0) as stream:
        kinds, text = [], ""
        for event in stream:
            kinds.append(event.type)
            text += event.delta if event.type == "response.output_text.delta" else ""
        final = stream.get_final_response()
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed" and text == final.output_text == "ABC"
    assert final.usage is not None and final.usage.output_tokens > 0


@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["text", "calls"])
def test_events_nest(client: openai.OpenAI, tools: Any) -> None:
    """vLLM responses/test_function_call.py::test_function_calling_with_streaming_types: everything
    that is opened is closed, in order"""
    more: dict[str, Any] = {"tools": tools, "tool_choice": "required"} if tools else {}
    more |= {"max_output_tokens": 400}
    opened: list[str] = []
    stream = client.responses.create(
        model=MODEL, input="upper: abc", stream=True, temperature=0, **more
    )
    for event in stream:
        kind = event.type
        begins = kind == "response.created" or kind.endswith("added")
        if begins or (kind.endswith("delta") and opened[-1] != kind):
            opened.append(kind)
        elif kind.endswith(("done", "completed")):
            assert opened.pop() == ENDS[kind]
    assert opened == []


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_forced_call(post: Post, choice: Any) -> None:
    """vLLM responses/test_function_call.py::test_function_tool_use, test_named_tool_use; SGLang
    test_responses_function_calling.py"""
    answer = ok(post(RESPONSES, input="weather?", tools=[TOOL], tool_choice=choice))
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    assert calls and answer["output"] == calls
    for call in calls:
        assert call["name"] == "get_weather" and call["call_id"] and call["status"] == "completed"
        jsonschema.validate(json.loads(call["arguments"]), FORM)


def test_a_streamed_call(client: openai.OpenAI) -> None:
    """vLLM responses/test_function_call.py::test_function_calling_with_streaming_..."""
    more: Any = {"tools": [TOOL], "tool_choice": NAMED, "parallel_tool_calls": False}
    grown, done = "", None
    stream = client.responses.create(
        model=MODEL, input="weather?", stream=True, temperature=0, **more
    )
    for event in stream:
        if event.type == "response.function_call_arguments.delta":
            grown += event.delta
        elif event.type == "response.output_item.done" and event.item.type == "function_call":
            done = event.item
    assert done is not None and done.arguments == grown and done.name == "get_weather"


def test_a_call_that_is_cut_off(post: Post) -> None:
    """vLLM responses/test_function_call.py::test_max_tokens_with_tool_choice_required: we return
    the partial call, marked incomplete"""
    body = {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 10}
    answer = ok(post(RESPONSES, input="weather?", **body))
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    texts = [part["text"] for item in answer["output"] for part in item.get("content") or ()]
    assert not any("<" in text for text in texts)


def test_a_call_and_its_result_are_accepted_as_history(client: openai.OpenAI) -> None:
    """vLLM responses/test_function_call.py::test_named_tool_use"""
    tools: Any = [{**TOOL, "strict": True}]
    turns: list[Any] = [{"role": "user", "content": "weather?"}]
    first = client.responses.create(
        model=MODEL, input=turns, tools=tools, tool_choice="required", temperature=0
    )
    turns += first.output
    for call in first.output:
        assert call.type == "function_call"
        turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "20"})
    assert client.responses.create(model=MODEL, input=turns, max_output_tokens=8)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "x"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "completed",
            "content": [
                {"type": "output_text", "text": "x", "annotations": [{"type": "url_citation"}]}
            ],
        },
        {"type": "message", "role": "user", "content": "x"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"role": "developer", "content": "x"},
        {"role": "assistant", "content": "x"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "x"}], "phase": "final"},
    ],
)
def test_items_are_accepted_as_input(post: Post, item: dict[str, Any]) -> None:
    """vLLM responses/test_replayed_input_items.py: with and without the fields that the server had
    added"""
    turns = [item, {"role": "user", "content": "upper: abc"}]
    assert ok(post(RESPONSES, input=turns, max_output_tokens=8))["output"]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "function_call", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "output": "x"},
        {"type": "bogus"},
        {"type": "message", "role": "user"},
        3,
    ],
)
def test_invalid_items_are_refused(post: Post, item: Any) -> None:
    """vLLM responses/test_replayed_input_items.py::test_function_call_dict_coerced_..."""
    error = refused(post(RESPONSES, input=[{"role": "user", "content": "a"}, item]))
    assert error["param"].startswith("input[1]")


def test_a_form(post: Post) -> None:
    """vLLM responses/test_structured_output.py::test_structured_output"""
    form = {"type": "json_schema", "name": "weather", "schema": FORM, "strict": True}
    answer = ok(post(RESPONSES, input="weather?", text={"format": {**form, "description": "x"}}))
    jsonschema.validate(json.loads(text_of(answer)), FORM)


def test_a_parsed_form(client: openai.OpenAI) -> None:
    """vLLM responses/test_structured_output.py::test_structured_output_with_parse"""

    class Deep(BaseModel):
        deep: bool

    answer = client.responses.parse(model=MODEL, input="x", text_format=Deep, temperature=0)
    assert isinstance(answer.output_parsed, Deep)
    turns: list[Any] = [*answer.output, {"role": "user", "content": "again"}]
    dumped = [item.model_dump() for item in answer.output]
    for more in (turns, [*dumped, turns[-1]]):
        assert client.responses.parse(model=MODEL, input=more, text_format=Deep).output_parsed


def test_store(client: openai.OpenAI) -> None:
    """vLLM responses/test_stateful.py::test_store"""
    kept = client.responses.create(model=MODEL, input="upper: abc")
    assert client.responses.retrieve(kept.id).status == "completed"
    lost = client.responses.create(model=MODEL, input="upper: abc", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(lost.id)


def test_delete(client: openai.OpenAI) -> None:
    """vLLM responses/test_store.py"""
    kept = client.responses.create(model=MODEL, input="upper: abc")
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)


def test_previous_response(client: openai.OpenAI) -> None:
    """vLLM responses/test_stateful.py::test_previous_response_id,
    test_two_responses_with_same_prev_id: the previous turns are in the prompt"""
    one = client.responses.create(model=MODEL, input="upper: abc", temperature=0)
    counts = []
    for text in ("upper: xy", "upper: xy"):
        two = client.responses.create(model=MODEL, input=text, previous_response_id=one.id)
        assert two.previous_response_id == one.id and two.usage and one.usage
        counts.append(two.usage.input_tokens)
    assert counts[0] == counts[1] > one.usage.input_tokens


@pytest.mark.parametrize("previous", ["bad", "resp_nothing"])
def test_an_unknown_previous_response(post: Post, previous: str) -> None:
    """SGLang test_openai_server.py::test_error; vLLM answers 404 if the id is well-formed"""
    answer = post(RESPONSES, input="Hi", previous_response_id=previous)
    assert answer.status_code in (400, 404)
    assert {"message", "type", "code"} <= set(answer.json()["error"])


def test_background_needs_store(client: openai.OpenAI) -> None:
    """vLLM responses/test_stateful.py::test_background_error"""
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=MODEL, input="x", background=True, store=False)


def test_cancelling_a_foreground_response_is_refused(client: openai.OpenAI) -> None:
    """vLLM responses/test_stateful.py::test_cancel_completed"""
    done = client.responses.create(model=MODEL, input="upper: abc")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(done.id)


def test_a_stream_has_no_sentinel(post: Post) -> None:
    """Ray test_responses.py::test_responses_endpoint_streaming"""
    answer = post(RESPONSES, input="upper: abc", stream=True)
    frames = [frame for frame in answer.text.split("\n\n") if frame.strip()]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert frames[0].startswith("event: response.created")
    assert frames[-1].startswith("event: response.completed") and "[DONE]" not in answer.text
    numbers = [json.loads(frame.split("data: ", 1)[1])["sequence_number"] for frame in frames]
    assert numbers == list(range(len(frames)))


@pytest.mark.parametrize(
    "tool",
    [{"type": "web_search"}, {"type": "code_interpreter"}, {"type": "mcp"}, {"type": "function"}],
)
def test_invalid_tools_are_refused(post: Post, tool: dict[str, Any]) -> None:
    """vLLM responses/test_mcp_tools.py: here built-in tools are refused by name"""
    assert refused(post(RESPONSES, input="x", tools=[tool]))["param"].startswith("tools[0]")
