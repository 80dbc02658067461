"""`/v1/messages`: after vLLM's Anthropic tests and Ray Serve LLM's."""

from __future__ import annotations

from typing import Any

import anthropic
import jsonschema
import pytest

from tests.conformance.in_process_server import MODEL
from tests.conformance.peers.conftest import Post
from tests.conformance.peers.requests import FORM, MESSAGES, UPPER, ok

pytestmark = pytest.mark.slow

TOOL: Any = {"name": "get_weather", "description": "x", "input_schema": FORM}
USED: Any = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "20"}
PLAIN: dict[str, Any] = {"messages": UPPER, "max_tokens": 32}


def create(claude: anthropic.Anthropic, **more: Any) -> Any:
    extra = {"extra_body": {"temperature": 0}}
    return claude.messages.create(model=MODEL, **{**PLAIN, **extra, **more})


def test_a_message(claude: anthropic.Anthropic) -> None:
    """vLLM test_messages.py::test_simple_messages; Ray test_anthropic_http.py"""
    answer = create(claude)
    assert answer.stop_reason == "end_turn" and answer.role == "assistant"
    assert answer.type == "message" and answer.content[0].text == "ABC"
    assert answer.id.startswith("msg_")
    assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0


@pytest.mark.parametrize("system", ["be brief", [{"type": "text", "text": "be brief"}]])
def test_a_system_message(claude: anthropic.Anthropic, system: Any) -> None:
    """vLLM test_messages.py::test_system_message"""
    assert create(claude, system=system).role == "assistant"


def test_events(claude: anthropic.Anthropic) -> None:
    """vLLM test_messages.py::test_anthropic_streaming; test_message_stream_converter.py"""
    kinds = [event.type for event in create(claude, stream=True) if event.type != "ping"]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_a_stream_equals_the_whole_message(claude: anthropic.Anthropic) -> None:
    """vLLM test_messages.py::test_anthropic_streaming, as the client accumulates it"""
    extra = {"temperature": 0}
    with claude.messages.stream(model=MODEL, **PLAIN, extra_body=extra) as stream:
        assert "".join(stream.text_stream) == "ABC"
        assert stream.get_final_message().stop_reason == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice",
    [{"type": "any"}, {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}],
)
def test_a_forced_call(claude: anthropic.Anthropic, choice: Any, stream: bool) -> None:
    """vLLM test_messages.py::test_anthropic_tool_call, test_anthropic_tool_call_streaming"""
    more: dict[str, Any] = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 400}
    if stream:
        body = {**PLAIN, **more, "extra_body": {"temperature": 0}}
        with claude.messages.stream(model=MODEL, **body) as events:
            answer: Any = events.get_final_message()
    else:
        answer = create(claude, **more)
    assert answer.stop_reason == "tool_use" and answer.content
    for block in answer.content:
        assert block.type == "tool_use" and block.id.startswith("toolu_")
        jsonschema.validate(block.input, FORM)


def test_a_call_and_its_result_are_accepted_as_history(claude: anthropic.Anthropic) -> None:
    """vLLM test_anthropic_messages_conversion.py: the client's own objects"""
    choice = {"type": "any", "disable_parallel_tool_use": True}
    first = create(claude, tools=[TOOL], tool_choice=choice, max_tokens=200)
    (call,) = first.content
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "20"}
    for content in (first.content, [call.model_dump()]):
        turns = [*UPPER, {"role": "assistant", "content": content}]
        turns.append({"role": "user", "content": [result]})
        assert create(claude, messages=turns, tools=[TOOL], max_tokens=4)


def conversation_with(block: Any) -> list[Any]:
    """Returns a conversation with this block, which is the user's if it answers a call, otherwise
    the assistant's."""
    if isinstance(block, dict) and block.get("type") != "tool_result":
        return [*UPPER, {"role": "assistant", "content": [block]}, *UPPER]
    called = {"role": "assistant", "content": [USED]}
    return [*UPPER, called, {"role": "user", "content": [block]}]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "text", "text": "hello"},
        {"type": "text", "text": "hello", "citations": None},
        {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}},
        {"type": "thinking", "thinking": "x", "signature": "s"},
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "redacted_thinking", "data": "opaque"},
        RESULT,
        {**RESULT, "content": None},
        {**RESULT, "content": [{"type": "text", "text": "20"}]},
        {**RESULT, "is_error": True},
        {"type": "tool_result", "tool_use_id": "toolu_1"},
    ],
)
def test_blocks(post: Post, block: dict[str, Any]) -> None:
    """vLLM test_content_block_validation.py: the valid blocks"""
    ok(post(MESSAGES, messages=conversation_with(block), max_tokens=4))


def test_calls_in_history(post: Post) -> None:
    """vLLM test_content_block_validation.py::test_tool_use_valid_passes,
    test_tool_use_empty_input_dict_passes"""
    for block in (USED, {**USED, "input": {}}, {**USED, "caller": {"type": "direct"}}):
        turns = [*UPPER, {"role": "assistant", "content": [block]}]
        ok(
            post(
                MESSAGES,
                messages=[*turns, {"role": "user", "content": [RESULT]}],
                max_tokens=4,
            )
        )


def without(block: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in block.items() if key != name}


@pytest.mark.parametrize(
    "block",
    [
        without(USED, "id"),
        {**USED, "id": ""},
        without(USED, "name"),
        {**USED, "name": ""},
        without(USED, "input"),
        without(RESULT, "tool_use_id"),
        {**RESULT, "tool_use_id": ""},
        {"type": "text"},
        {"type": "image"},
        {"type": "thinking", "signature": "abc"},
        {"type": "bogus"},
        {},
        3,
    ],
)
def test_invalid_blocks_are_refused(post: Post, block: Any) -> None:
    """vLLM test_content_block_validation.py: the invalid blocks"""
    answer = post(MESSAGES, messages=conversation_with(block), max_tokens=4)
    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "error" and answer.json()["error"]["message"]


def test_a_system_message_among_others(post: Post) -> None:
    """vLLM test_system_hoist.py: Claude Code sends system messages like this"""
    for content in ("be brief", [{"type": "text", "text": "be brief"}]):
        turns = [{"role": "system", "content": content}, *UPPER]
        ok(post(MESSAGES, messages=turns, max_tokens=4))


def test_other_roles(post: Post) -> None:
    """vLLM test_system_hoist.py::test_invalid_role_still_rejected"""
    turns = [*UPPER, {"role": "tool", "content": "x"}]
    assert post(MESSAGES, messages=turns, max_tokens=4).status_code == 400


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL]}, {"system": "be brief"}])
def test_count_of_tokens(claude: anthropic.Anthropic, more: Any) -> None:
    """vLLM test_serving_messages.py: /v1/messages/count_tokens equals the usage of the answer"""
    counted = claude.messages.count_tokens(model=MODEL, messages=UPPER, **more)  # type: ignore[arg-type]
    usage = create(claude, **more, max_tokens=1).usage
    cached = usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert counted.input_tokens == usage.input_tokens + cached


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"messages": []},
        {"temperature": -1},
        {"stop_sequences": [""]},
        {"tool_choice": {"type": "any"}},
        {"tools": [{"name": "a b", "input_schema": FORM}], "tool_choice": {"type": "any"}},
        {"an_unknown_name": 1},
    ],
)
def test_invalid_requests_are_refused(post: Post, more: dict[str, Any]) -> None:
    """vLLM test_anthropic_protocol.py; Ray test_anthropic_http.py: in Anthropic's own format"""
    answer = post(MESSAGES, **{**PLAIN, **more})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_errors_have_anthropics_form(post: Post, path: str) -> None:
    """Ray test_anthropic_http.py::test_missing_model_error_envelope, test_validation_error_..."""
    body = PLAIN if path == MESSAGES else {"messages": UPPER}
    answer = post(path, **body, model="missing-model")
    assert answer.status_code == 404 and answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "not_found_error"
    assert "missing-model" in answer.json()["error"]["message"]
    answer = post(path, messages=3)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "more",
    [
        {"top_k": 5, "top_p": 0.9},
        {"stop_sequences": ["B"]},
        {"metadata": {"user_id": "me"}},
        {"thinking": {"type": "disabled"}},
        {"service_tier": "auto"},
        {"tool_choice": {"type": "auto"}, "tools": [TOOL]},
        {"tool_choice": {"type": "none"}, "tools": [TOOL]},
    ],
)
def test_fields(post: Post, more: dict[str, Any]) -> None:
    """vLLM test_anthropic_protocol.py"""
    answer = ok(post(MESSAGES, **PLAIN, **more))
    if "stop_sequences" in more:
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "B")
