"""Request bodies: which are accepted, and which are refused by name. No other error is raised."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion as OpenAIChatCompletion

from swell.cluster.api.bodies.http_errors import ErrorInfo, error_body, error_info
from swell.cluster.api.bodies.protocol_base import usage
from swell.cluster.api.chat.protocol import (
    ChatChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatResponseMessage,
)
from swell.cluster.api.completions.protocol import Completion, CompletionChoice, CompletionRequest
from swell.cluster.api.tokenize import DetokenizeRequest, TokenizeRequest
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.schema.decode import decode
from swell.cluster.text.schema.request_body import not_served

KINDS: list[type[Any]] = [
    CompletionRequest,
    ChatCompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
]
USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> CompletionRequest:
    body = {"model": "m", "prompt": "hi", **fields}
    return decode(json.dumps(body).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [USER], **fields}
    return decode(json.dumps(body).encode(), ChatCompletionRequest)


def refusal(make: Any, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        make(**fields)
    return caught.value


CONTRACT = {
    "ignore_eos": True,
    "min_tokens": 2,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.0,
    "stop_token_ids": [3],
    "include_stop_str_in_output": True,
    "prompt_logprobs": None,
    "priority": -1,
    "cache_salt": "x",
    "bad_words": [],
    "allowed_token_ids": None,
    "data_parallel_rank": 0,
    "return_token_ids": True,
}
NEUTRAL_BOTH = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "user": "u",
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "seed": None,
    "response_format": {"type": "text"},
}
NEUTRAL_COMPLETION = {"best_of": 1, "echo": False, "logprobs": None, "suffix": ""}
NEUTRAL_CHAT = {
    "logprobs": False,
    "top_logprobs": 0,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "functions": None,
    "modalities": ["text"],
    "store": False,
}


def test_contract_fields_and_neutral_values_pass() -> None:
    request = completion(**CONTRACT, **NEUTRAL_BOTH, **NEUTRAL_COMPLETION)
    assert (request.top_k, request.priority, request.cache_salt) == (5, -1, "x")
    chat(**CONTRACT, **NEUTRAL_BOTH, **NEUTRAL_CHAT)


UNSUPPORTED = [
    (completion, "suffix", "end"),
    (chat, "functions", [{}]),
    (chat, "modalities", ["audio"]),
    (chat, "prediction", {"type": "content"}),
]


@pytest.mark.parametrize(("make", "field", "value"), UNSUPPORTED)
def test_unsupported_fields_are_refused_by_name(make: Any, field: str, value: Any) -> None:
    error = refusal(make, **{field: value})
    assert error.param == field
    assert error.message.startswith(f"{field}=")
    assert "not supported" in error.message


@pytest.mark.parametrize("name", sorted(not_served(CompletionRequest)))
def test_every_unsupported_field_of_completions_exists(name: str) -> None:
    assert name in CompletionRequest.__struct_fields__
    completion(**{name: None})


@pytest.mark.parametrize("name", sorted(not_served(ChatCompletionRequest)))
def test_every_unsupported_field_of_chat_exists(name: str) -> None:
    assert name in ChatCompletionRequest.__struct_fields__
    chat(**{name: None})


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"max_token": 3}, "max_token", "did you mean 'max_tokens'"),
        ({"temperature": "hot"}, "temperature", "temperature='hot': expected number or null"),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens=1.5: expected integer"),
        ({"max_tokens": True}, "max_tokens", "max_tokens=True"),
        ({"prompt": [1, "a", [1, "b"]]}, "prompt[2][1]", "='b': expected integer"),
        ({"prompt": {"a": 1}}, "prompt", "prompt={'a': 1}"),
        ({"stop": [1]}, "stop[0]", "stop[0]=1"),
        ({"stream_options": {"x": 1}}, "stream_options.x", "unknown"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        ({"data_parallel_rank": -1}, "data_parallel_rank", "at least 0"),
        ({"priority": 2**40}, "priority", "between"),
        ({"cache_salt": ""}, "cache_salt", "empty"),
        ({"cache_salt": "s" * 2000}, "cache_salt", "1024"),
        ({"seed": "z" * 10_000}, "seed", "..."),
        ({"logit_bias": {"1": "y"}}, "logit_bias[...]", "expected number"),
        ({"n": 2, "best_of": 3, "stream": True}, "best_of", "best_of=3 is above n=2"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "xml"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "x"}}},
            "response_format",
            "does not allow",
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "response_format and structured_outputs",
        ),
    ],
)
def test_refusal_names_field_and_value(fields: dict[str, Any], param: str, text: str) -> None:
    error = refusal(completion, **fields)
    assert error.param == param
    assert text in error.message
    assert len(error.message) < 300


@pytest.mark.parametrize(
    ("messages", "param", "text"),
    [
        ([], "messages", "at least one"),
        ([{"role": "a bot", "content": "x"}], "messages[0].role", "developer, user"),
        ([USER, {"role": "user"}], "messages[1].content", "needs text"),
        ([{"role": "user", "content": 5}], "messages[0].content", "=5"),
        ([{"role": "user", "content": "a", "audio": {}}], "messages[0].audio", "not supported"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}],
            "messages[0].content[0].type",
            "'image_url' is not supported",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "miss"),
        (
            [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}],
            "messages[0].tool_calls[0].function",
            "missing",
        ),
    ],
)
def test_refusal_of_messages(messages: list[Any], param: str, text: str) -> None:
    error = refusal(chat, messages=messages)
    assert error.param == param
    assert text in error.message


def test_text_parts_become_lines() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "user", "content": parts}])
    assert request.messages[0].text == "a\nb"


def test_our_answer_is_accepted_as_history() -> None:
    """Clients append the answer's message, with all its nulls, to the conversation."""
    message = json.loads(msgspec.json.encode(ChatResponseMessage(content="hello")))
    message |= {"audio": None, "function_call": None, "tool_calls": None, "annotations": None}
    assert chat(messages=[USER, message]).messages[1].text == "hello"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "empty"),
        (b"   ", "empty"),
        (b"{", "not valid JSON"),
        (b'{"model": "m", "prompt": "x"', "not valid JSON"),
        (b"[1]", "expected object, got array"),
        (b"null", "expected object, got null"),
        (b'"x"', "expected object, got string"),
        (b'{"model":"m","prompt":"x","temperature":NaN}', "NaN"),
        (b'{"model":"m","prompt":"x","temperature":-Infinity}', "-Infinity"),
        (b'{"model":"m","prompt":"x","temperature":1e999}', "out of range"),
        (b'{"model":"m","prompt":"a\\ud800"}', "prompt contains a lone surrogate"),
        (b'{"model":"m","prompt":["a","\\udfff b"]}', "prompt[1] contains a lone surrogate"),
        (b'{"model":"m","prompt":["\\ud800"],"user":"\\ud800"}', "prompt[0] contains a lone"),
        (b'{"model":"m","metadata":{"a":["b","\\ud800"]}}', "metadata.a[1] contains a lone"),
        (b'{"model":"m","metadata":{"\\ud800":1}}', "metadata contains a lone"),
        (b'{"model":"m","prompt":"\xff"}', "not UTF-8"),
        ("{}".encode("utf-16"), "not UTF-8"),
        (b'{"model":"m"}', "'prompt' is missing"),
        (b"[" * 100_000, "expected object"),
        (b'{"model":"m","metadata":' + b"[" * 100_000, "JSON"),
    ],
)
def test_broken_bodies(body: bytes, text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode(body, CompletionRequest)
    assert text in caught.value.message
    json.loads(msgspec.json.encode(error_body(error_info(caught.value))))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
FIELDS = st.sampled_from(
    sorted({name for kind in KINDS for name in kind.__struct_fields__} | {"x", ""})
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(KINDS), st.dictionaries(FIELDS, JSON, max_size=6))
def test_any_json_is_accepted_or_refused(kind: type[Any], body: Any) -> None:
    base = {"model": "m", "prompt": "x"} if kind is CompletionRequest else {"model": "m"}
    with contextlib.suppress(BadRequest):
        decode(json.dumps({**base, **body}).encode(), kind)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(KINDS), st.data())
def test_damaged_bytes_are_accepted_or_refused(kind: type[Any], data: st.DataObject) -> None:
    whole = b'{"model":"m","messages":[{"role":"user","content":"h\\ud83d\\ude00i"}],"top_p":0.5}'
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, len(whole)))
    body = whole[:start] + data.draw(st.binary(max_size=6)) + whole[end:]
    with contextlib.suppress(BadRequest):
        decode(body, kind)


def test_a_bias_of_an_invalid_token_is_refused() -> None:
    error = refusal(lambda: completion(logit_bias={"x": 1}).sampling_params())
    assert error.param == "logit_bias"
    assert "'x' is not a token id" in error.message
    assert completion(logit_bias={"7": -1}).sampling_params().logit_bias == {7: -1.0}


def test_sampling_params_have_request_fields_and_defaults() -> None:
    assert completion().sampling_params().max_tokens == 16
    assert chat().sampling_params().max_tokens is None
    assert chat(max_completion_tokens=5).sampling_params().max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=5).sampling_params().max_tokens == 5
    assert refusal(chat, max_tokens=5, max_completion_tokens=6).param == "max_tokens"
    params = completion(
        temperature=0, top_p=0.5, top_k=3, min_p=0.1, seed=4, max_tokens=9, min_tokens=1,
        stop="x", stop_token_ids=[2], ignore_eos=True, include_stop_str_in_output=True,
        skip_special_tokens=False,
    ).sampling_params()  # fmt: skip
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 0.5, 3, 0.1)
    assert (params.seed, params.max_tokens, params.min_tokens) == (4, 9, 1)
    assert (params.stop_strings, params.stop_token_ids) == (["x"], [2])
    assert params.ignore_eos
    assert params.include_stop_str_in_output
    assert not params.skip_special_tokens


def test_tokenize_accepts_a_prompt_or_messages() -> None:
    decode(b'{"prompt":"x"}', TokenizeRequest)
    decode(b'{"messages":[{"role":"user","content":"x"}]}', TokenizeRequest)
    for body in (b"{}", b'{"prompt":"x","messages":[]}'):
        with pytest.raises(BadRequest, match="either"):
            decode(body, TokenizeRequest)


def test_responses_match_openais_types() -> None:
    """The client's own types accept the responses in strict mode."""
    answer = Completion(
        id="1",
        created=2,
        model="m",
        choices=[CompletionChoice(index=0, text="t", finish_reason="stop")],
        usage=usage(3, 4, 1),
    )
    parsed = OpenAICompletion.model_validate_json(msgspec.json.encode(answer))
    assert parsed.usage is not None
    assert (parsed.choices[0].text, parsed.usage.total_tokens) == ("t", 7)
    message = ChatResponseMessage(content="t")
    chat_answer = ChatCompletion(
        id="1",
        created=2,
        model="m",
        choices=[ChatChoice(index=0, message=message, finish_reason="length")],
        usage=usage(3, 4, 1),
    )
    chatted = OpenAIChatCompletion.model_validate_json(msgspec.json.encode(chat_answer))
    assert chatted.usage is not None
    assert chatted.usage.prompt_tokens_details is not None
    assert chatted.usage.prompt_tokens_details.cached_tokens == 1
    assert chatted.choices[0].message.content == "t"


def test_error_body() -> None:
    body = msgspec.to_builtins(error_body(ErrorInfo(400, "m", param="p", code="c")))
    assert body == {
        "error": {"message": "m", "type": "invalid_request_error", "param": "p", "code": "c"}
    }
    body = msgspec.to_builtins(error_body(ErrorInfo(500, "gone", "server_error")))
    assert body["error"] == {
        "message": "gone", "type": "server_error", "param": None, "code": None
    }  # fmt: skip


def test_every_body_has_a_schema() -> None:
    _, components = msgspec.json.schema_components([*KINDS, Completion, ChatCompletion])
    assert components["CompletionRequest"]["additionalProperties"] is False
