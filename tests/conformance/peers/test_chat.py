"""`/v1/chat/completions`: after vLLM's test_chat.py and its neighbours, SGLang's
test_openai_server.py and Ray Serve LLM's router tests."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.conformance.in_process_server import MODEL
from tests.conformance.peers.conftest import Post
from tests.conformance.peers.differences import differs
from tests.conformance.peers.requests import CHAT, UPPER, choices, events, ok, refused

pytestmark = pytest.mark.slow

LONG = {"messages": UPPER, "max_completion_tokens": 10, "ignore_eos": True}


def test_no_logprobs(post: Post) -> None:
    """vLLM test_chat.py::test_no_logprobs_chat"""
    answer = ok(post(CHAT, messages=UPPER, max_completion_tokens=5, logprobs=False))
    assert answer["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("top", [0, 5])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(post: Post, top: int, stream: bool) -> None:
    """vLLM test_chat.py::test_zero_logprobs_chat, test_some_logprobs_chat; SGLang
    test_openai_server.py::test_chat_completion_stream"""
    answer = post(CHAT, messages=UPPER, logprobs=True, top_logprobs=top, stream=stream)
    parts = choices(events(answer)) if stream else ok(answer)["choices"]
    response = [one for part in parts if part["logprobs"] for one in part["logprobs"]["content"]]
    assert [one["token"] for one in response][:3] == list("ABC")
    assert all(len(one["top_logprobs"]) == top for one in response)


@pytest.mark.parametrize(("top", "stream"), [(21, True), (30, False)])
def test_too_many_logprobs(post: Post, top: int, stream: bool) -> None:
    """vLLM test_chat.py::test_too_many_chat_logprobs"""
    body = {"messages": UPPER, "logprobs": True, "top_logprobs": top}
    assert "logprobs" in refused(post(CHAT, **body, stream=stream))["param"]
    assert ok(post(CHAT, messages=UPPER, max_completion_tokens=10))


@pytest.mark.parametrize("requested", [0, 1, 2, None])
def test_prompt_logprobs(post: Post, requested: int | None) -> None:
    """vLLM test_chat.py::test_prompt_logprobs_chat, test_more_than_one_prompt_logprobs_chat"""
    turns = [*UPPER, {"role": "assistant", "content": "ABC"}, *UPPER]
    more = {} if requested is None else {"prompt_logprobs": requested}
    response = ok(post(CHAT, messages=turns, max_tokens=1, **more))["prompt_logprobs"]
    assert (response is None) == (requested is None)
    if requested is not None:
        assert max(requested, 1) <= len(response[3]) <= requested + 1


@differs("vllm test_chat_echo.py::test_top_logprobs[-1]")
def test_every_logprob(post: Post) -> None:
    """vLLM test_chat_echo.py::test_top_logprobs"""
    ok(post(CHAT, messages=UPPER, max_tokens=1, logprobs=True, top_logprobs=-1))


def test_single_chat_session(client: openai.OpenAI) -> None:
    """vLLM test_chat.py::test_single_chat_session"""
    turns: list[Any] = [{"role": "system", "content": "you are helpful"}, *UPPER]
    answer = client.chat.completions.create(
        model=MODEL, messages=turns, max_completion_tokens=2, temperature=0
    )
    (choice,) = answer.choices
    assert answer.id and choice.finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 2
    assert choice.message.role == "assistant" and choice.message.content == "AB"
    turns += [choice.message, {"role": "user", "content": "upper: xy"}]
    second = client.chat.completions.create(model=MODEL, messages=turns, max_completion_tokens=5)
    assert second.choices[0].message.content is not None


def test_streaming(client: openai.OpenAI) -> None:
    """vLLM test_chat.py::test_chat_streaming"""
    options: dict[str, Any] = {"model": MODEL, "messages": UPPER, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0]
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == whole.message.content
    assert [chunk.delta.role for chunk in chunks if chunk.delta.role] == ["assistant"]
    ends = [chunk.finish_reason for chunk in chunks if chunk.finish_reason]
    assert ends == [whole.finish_reason] == [chunks[-1].finish_reason]


@pytest.mark.parametrize("options", [{}, {"include_usage": False}])
def test_no_usage(post: Post, options: dict[str, bool]) -> None:
    """vLLM test_chat.py::test_chat_completion_stream_options: its first request"""
    chunks = events(post(CHAT, **LONG, stream=True, stream_options=options))
    assert all(chunk.get("usage") is None for chunk in chunks)


def test_usage_at_the_end(post: Post) -> None:
    """vLLM test_chat.py::test_chat_completion_stream_options: its second request"""
    options = {"include_usage": True, "continuous_usage_stats": False}
    *chunks, last = events(post(CHAT, **LONG, stream=True, stream_options=options))
    assert all(chunk["usage"] is None for chunk in chunks)
    usage = last["usage"]
    assert last["choices"] == [] and usage["completion_tokens"] == 10
    assert usage["total_tokens"] == usage["prompt_tokens"] + 10


def test_usage_with_every_chunk(post: Post) -> None:
    """vLLM test_chat.py::test_chat_completion_stream_options: its fifth request; the chunk of the
    role has usage too"""
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(post(CHAT, **LONG, stream=True, stream_options=options))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[0] == 0 and counts == sorted(counts) and counts[-1] == 10
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1


@pytest.mark.parametrize("value", [True, None])
def test_usage_needs_a_stream(post: Post, value: bool | None) -> None:
    """vLLM test_chat.py::test_chat_completion_stream_options: its third and fourth request"""
    refused(post(CHAT, **LONG, stream_options={"include_usage": value}))


@differs("vllm test_chat.py::test_chat_completion_stream_options[min_characters]")
def test_characters_at_least(post: Post) -> None:
    """vLLM test_chat.py::test_chat_completion_stream_options: its last request"""
    ok(post(CHAT, **LONG, min_characters=10))


def test_unknown_fields_in_messages(post: Post) -> None:
    """vLLM test_chat.py::test_extra_fields_allowed"""
    turns = [UPPER[0] | {"extra_field": "0"}]
    assert ok(post(CHAT, messages=turns))["choices"][0]["message"]["content"] == "ABC"


def test_unknown_fields_in_parts(post: Post) -> None:
    """vLLM test_extra_content_fields.py"""
    part = {"type": "text", "text": "upper: abc", "source_lang_code": "en"}
    turns = [{"role": "user", "content": [part]}]
    assert ok(post(CHAT, messages=turns))["choices"][0]["message"]["content"] == "ABC"


@pytest.mark.parametrize("role", ["user", "system"])
def test_content_of_parts(post: Post, role: str) -> None:
    """vLLM test_chat.py::test_complex_message_content, test_chat_error.py"""
    text = "upper: abc" if role == "user" else "x"
    turns: list[Any] = [{"role": role, "content": [{"type": "text", "text": text}]}]
    turns += UPPER if role == "system" else []
    assert ok(post(CHAT, messages=turns))["choices"][0]["message"]["content"]


def test_custom_roles(post: Post) -> None:
    """vLLM test_chat.py::test_custom_role: a text and a single part have the same prompt"""
    contents: list[Any] = ["upper: abc", [{"type": "text", "text": "upper: abc"}]]
    prompts = [
        ok(post("/tokenize", messages=[{"role": "my-role", "content": one}]))["tokens"]
        for one in contents
    ]
    assert prompts[0] == prompts[1] and bytes(t for t in prompts[0] if t < 256)


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63])
def test_long_seeds(post: Post, seed: int) -> None:
    """vLLM test_chat.py::test_long_seed"""
    assert refused(post(CHAT, messages=UPPER, seed=seed))["param"] == "seed"


@differs("vllm test_chat.py::test_invocations")
def test_invocations(post: Post) -> None:
    """vLLM test_chat.py::test_invocations"""
    ok(post("/invocations", messages=UPPER))


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_n(post: Post, n: int, stream: bool) -> None:
    """vLLM test_chat.py::test_chat_completion_n_parameter_*, SGLang
    test_openai_server.py::test_chat_completion_stream: one finish reason for each"""
    body = {"messages": UPPER, "n": n, "max_tokens": 15, "stream": stream}
    answer = post(CHAT, **body, temperature=0.7, seed=42)
    parts = choices(events(answer)) if stream else ok(answer)["choices"]
    ends = [part["index"] for part in parts if part["finish_reason"]]
    assert sorted(ends) == list(range(n))
    if stream:
        roles = [part["index"] for part in parts if part["delta"].get("role")]
        assert sorted(roles) == list(range(n))
    else:
        assert [part["index"] for part in parts] == ends


def test_n_with_a_seed(post: Post) -> None:
    """vLLM test_chat.py::test_chat_completion_n_with_seed: repeated with the same result"""
    body = {"messages": UPPER, "n": 2, "max_tokens": 10, "temperature": 0.8, "seed": 42}
    first, second = (ok(post(CHAT, **body))["choices"] for _ in range(2))
    assert [one["message"] for one in first] == [one["message"] for one in second]


@pytest.mark.parametrize("echo", [True, False])
def test_echo_of_a_continued_message(post: Post, echo: bool) -> None:
    """vLLM test_chat_echo.py::test_chat_session_with_echo_and_continue_final_message"""
    turns = [*UPPER, {"role": "assistant", "content": "AB"}]
    body = {"messages": turns, "echo": echo, "continue_final_message": True}
    content = ok(post(CHAT, **body, add_generation_prompt=False))["choices"][0]["message"]
    assert content["content"] == ("ABC" if echo else "C")


def test_a_message_is_continued(post: Post) -> None:
    """SGLang test_openai_server.py::test_response_prefill"""
    turns = [
        {"role": "user", "content": "upper: abcde"},
        {"role": "assistant", "content": "ABC"},
    ]
    answer = ok(post(CHAT, messages=turns, continue_final_message=True))
    assert answer["choices"][0]["message"]["content"] == "DE"


def test_continuing_excludes_a_new_message(post: Post) -> None:
    """vLLM protocol: continue_final_message and add_generation_prompt"""
    turns = [*UPPER, {"role": "assistant", "content": "AB"}]
    body = {"continue_final_message": True, "add_generation_prompt": True}
    refused(post(CHAT, messages=turns, **body))


def test_token_ids_are_returned(post: Post) -> None:
    """vLLM test_return_token_ids.py::test_chat_completion_with_emoji_and_token_ids"""
    turns = [{"role": "user", "content": "cats 🐱"}]
    body = {"messages": turns, "max_tokens": 12}
    whole = ok(post(CHAT, **body, return_token_ids=True))
    ids = whole["choices"][0]["token_ids"]
    text = bytes(one for one in whole["prompt_token_ids"] if one < 256).decode()
    assert "cats 🐱" in text and ids
    chunks = events(post(CHAT, **body, return_token_ids=True, stream=True))
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any(chunk.get("prompt_token_ids") for chunk in chunks[1:])
    assert [one for part in choices(chunks) for one in part.get("token_ids") or ()] == ids
    plain = ok(post(CHAT, **body, return_token_ids=False))
    assert plain["prompt_token_ids"] is None and plain["choices"][0]["token_ids"] is None


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_limits_of_tokens(post: Post, field: str) -> None:
    """SGLang test_large_max_new_tokens.py; vLLM protocol: the two names of one limit"""
    answer = ok(post(CHAT, messages=UPPER, ignore_eos=True, **{field: 7}))
    assert answer["usage"]["completion_tokens"] == 7


def test_reasoning_in_history(post: Post) -> None:
    """vLLM test_chat_completion_request_validations.py::test_reasoning_*"""
    for name in ("reasoning", "reasoning_content"):
        turns = [*UPPER, {"role": "assistant", "content": "ABC", name: "easy"}, *UPPER]
        ok(post(CHAT, messages=turns, max_tokens=4))


@pytest.mark.parametrize("field", ["separate_reasoning", "stream_reasoning", "include_reasoning"])
def test_reasoning_apart(post: Post, field: str) -> None:
    """SGLang test_protocol.py::test_chat_completion_sglang_extensions; vLLM
    test_include_reasoning.py: true is our behaviour"""
    ok(post(CHAT, messages=UPPER, **{field: True}))


def test_variables_of_the_template(post: Post) -> None:
    """SGLang test_protocol.py::test_chat_completion_sglang_extensions"""
    ok(post(CHAT, messages=UPPER, chat_template_kwargs={"custom_param": "value"}))


def test_null_means_absent(client: openai.OpenAI, post: Post) -> None:
    """vLLM and SGLang: a field that is null is a field that is absent"""
    names = ("temperature", "top_p", "stop", "seed", "max_tokens", "tools", "tool_choice", "user")
    more = ("response_format", "logit_bias", "stream_options", "logprobs", "n", "stream", "min_p")
    ok(post(CHAT, messages=UPPER, **dict.fromkeys((*names, *more))))


def test_no_fingerprint_is_null(client: openai.OpenAI) -> None:
    """vLLM test_system_fingerprint_none.py"""
    answer = client.chat.completions.create(model=MODEL, messages=UPPER, max_tokens=1)  # type: ignore[arg-type]
    assert answer.system_fingerprint is None


def test_matched_stop(post: Post) -> None:
    """SGLang test_matched_stop.py::test_finish_stop_str, test_finish_stop_eos, test_finish_length:
    by vLLM's name"""
    cases: list[tuple[dict[str, Any], str, Any]] = [
        ({"stop": "B"}, "stop", "B"),
        ({}, "stop", None),
        ({"max_tokens": 2}, "length", None),
        ({"stop_token_ids": [67]}, "stop", 67),
    ]
    for more, reason, matched in cases:
        (choice,) = ok(post(CHAT, messages=UPPER, **more))["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == (reason, matched)


@differs("sglang test_matched_stop.py::matched_stop")
def test_matched_stop_by_its_other_name(post: Post) -> None:
    """SGLang test_matched_stop.py"""
    assert ok(post(CHAT, messages=UPPER, stop="B"))["choices"][0]["matched_stop"] == "B"


@differs("sglang test_matched_stop.py::test_finish_stop_regex_str")
def test_stop_by_regex(post: Post) -> None:
    """SGLang test_matched_stop.py::test_finish_stop_regex_str"""
    ok(post(CHAT, messages=UPPER, stop_regex="B|C"))


@differs("sglang test_openai_server_hidden_states.py")
def test_hidden_states(post: Post) -> None:
    """SGLang test_openai_server_hidden_states.py"""
    ok(post(CHAT, messages=UPPER, return_hidden_states=True))


@differs("vllm test_vision.py")
@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://example.com/image.jpg"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "https://example.com/video.mp4"}},
    ],
)
def test_other_than_text(post: Post, part: dict[str, Any]) -> None:
    """vLLM test_vision.py, test_audio.py, test_video.py"""
    ok(post(CHAT, messages=[{"role": "user", "content": [part]}]))
