"""The fields that clients read from an answer exist, under the names that other servers use."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion

from swell.cluster.api.answers.response_writer import usage_of
from swell.cluster.api.messages.content import call_id, tool_use_id
from swell.cluster.api.messages.convert import chat_messages
from swell.cluster.api.messages.protocol import MessagesRequest
from swell.cluster.api.messages.writer import MessagesResponseWriter
from swell.cluster.client.requests.outputs import CompletionOutput, RequestOutput
from swell.cluster.text.parsers import make_parser
from swell.cluster.text.schema.decode import decode
from tests.cluster.api.answers.test_response_writers import chat_answer, completion_answer, stream

OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
PROMPTS = [[7, 8, 9], [4]]


def outputs(texts: list[str], prompt: int = 0, index: int = 0) -> list[RequestOutput]:
    """Returns the deltas of one choice, one token each."""
    return [
        RequestOutput(
            request_id="r",
            prompt_token_ids=PROMPTS[prompt],
            outputs=[
                CompletionOutput(
                    index=index,
                    text=text,
                    token_ids=[place],
                    num_output_tokens=place + 1,
                    finish_reason="stop" if place == len(texts) - 1 else None,
                )
            ],
            finished=place == len(texts) - 1,
            num_cached_tokens=2 - prompt,
        )
        for place, text in enumerate(texts)
    ]


def whole(answer: Any, output: RequestOutput) -> dict[str, Any]:
    used = usage_of([output], output.outputs[0].num_output_tokens)
    body: dict[str, Any] = msgspec.to_builtins(answer.full_response([output], used))
    return body


@pytest.mark.parametrize("n", [1, 2])
def test_the_first_chunk_of_a_chat_stream_has_the_prompt_ids(n: int) -> None:
    deltas = [(choice, one) for choice in range(n) for one in outputs(["a", "b"], index=choice)]
    answer = chat_answer(n=n, stream=True, return_token_ids=True)
    first, *others = stream(answer, deltas, n)
    assert first["prompt_token_ids"] == PROMPTS[0]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("prompt_token_ids" in one for one in others)
    assert [one["choices"][0]["index"] for one in [first, *others][:n]] == list(range(n))


def test_each_completion_begins_with_the_ids_of_its_prompt() -> None:
    deltas = [
        (prompt * 2 + index, one)
        for prompt in range(2)
        for index in range(2)
        for one in outputs(["a", "b"], prompt, index)
    ]
    answer = completion_answer(n=2, stream=True, return_token_ids=True)
    ids: dict[int, list[Any]] = {}
    for event in stream(answer, deltas, 4):
        for choice in event["choices"]:
            ids.setdefault(choice["index"], []).append(choice.get("prompt_token_ids"))
    assert ids == {choice: [PROMPTS[choice // 2], None] for choice in range(4)}


def test_token_ids_are_absent_by_default() -> None:
    for answer in (chat_answer(stream=True), completion_answer(stream=True)):
        text = json.dumps(stream(answer, [(0, one) for one in outputs(["a", "b"])], 1))
        assert "token_ids" not in text


def test_every_chunk_has_usage_under_continuous_usage_stats() -> None:
    """The chunk with the role counts no output token yet."""
    deltas = [(choice, one) for choice in range(2) for one in outputs(["a", "b"], index=choice)]
    events = stream(chat_answer(n=2, stream=True, stream_options=OPTIONS), deltas, 2)
    assert [one["usage"]["completion_tokens"] for one in events] == [0, 0, 1, 2, 2, 1, 2, 2, 4]
    for one in events:
        usage = one["usage"]
        assert usage["prompt_tokens"] == 3
        assert usage["total_tokens"] == 3 + usage["completion_tokens"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


@pytest.mark.parametrize("hidden", [False, True])
def test_every_chunk_counts_the_reasoning_tokens(hidden: bool) -> None:
    """The count covers the choice so far, even if the reasoning is not shown. The last chunk counts
    all choices."""
    texts = ["<think>", "one ", "", "two ", "three", "</think>", "four ", "five"]
    deltas = [(choice, one) for choice in range(2) for one in outputs(texts, index=choice)]
    fields = {"include_reasoning": not hidden, "stream_options": OPTIONS}
    *events, last = stream(chat_answer(n=2, stream=True, **fields), deltas, 2)
    counts: dict[int, list[int]] = {0: [], 1: []}
    for one in events:
        (choice,) = one["choices"]
        count = one["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert count <= one["usage"]["completion_tokens"]
        counts[choice["index"]].append(count)
    for found in counts.values():
        assert found == sorted(found) and (found[0], found[-1]) == (0, 3)
        assert hidden or {*found} == {0, 1, 2, 3}
    assert last["usage"]["completion_tokens_details"] == {"reasoning_tokens": 6}


ABSENT_CHAT = "service_tier system_fingerprint prompt_logprobs prompt_token_ids"
ABSENT_CHOICE = "logprobs stop_reason token_ids"
ABSENT_MESSAGE = "refusal reasoning_content reasoning tool_calls function_call audio annotations"
ABSENT_COMPLETION = "service_tier system_fingerprint"
ABSENT_COMPLETION_CHOICE = "logprobs stop_reason token_ids prompt_logprobs prompt_token_ids"


def read(thing: Any, names: str) -> list[Any]:
    return [getattr(thing, name) for name in names.split()]


def test_absent_parts_of_an_answer_read_as_none() -> None:
    (output,) = outputs(["a"])
    chat = ChatCompletion.model_validate(whole(chat_answer(), output))
    assert set(read(chat, ABSENT_CHAT)) == {None}
    assert set(read(chat.choices[0], ABSENT_CHOICE)) == {None}
    assert set(read(chat.choices[0].message, ABSENT_MESSAGE)) == {None}
    completion = Completion.model_validate(whole(completion_answer(), output))
    assert set(read(completion, ABSENT_COMPLETION)) == {None}
    assert set(read(completion.choices[0], ABSENT_COMPLETION_CHOICE)) == {None}


def test_present_parts_of_an_answer_are_readable() -> None:
    (output,) = outputs(["<think>why</think>so"])
    chat = ChatCompletion.model_validate(whole(chat_answer(return_token_ids=True), output))
    assert read(chat, "prompt_token_ids") == [PROMPTS[0]]
    assert read(chat.choices[0], "token_ids") == [[0]]
    message = chat.choices[0].message
    assert read(message, "content reasoning_content reasoning") == ["so", "why", "why"]


CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]',
    "llama3": '{"name": "f", "parameters": {"a": 1}}',
}
TURN = {"role": "user", "content": "x"}


def messages_answer(name: str) -> MessagesResponseWriter:
    body = {"model": "m", "messages": [TURN], "max_tokens": 9}
    request = decode(json.dumps(body).encode(), MessagesRequest)
    return MessagesResponseWriter("r", "m", request, lambda: make_parser(name, None))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("streamed", [False, True])
def test_anthropic_call_ids_map_to_the_formats_ids_and_back(name: str, streamed: bool) -> None:
    (output,) = outputs([CALLS[name]])
    answer = messages_answer(name)
    if streamed:
        events = [
            json.loads(one.split(b"data: ")[1])
            for one in answer.delta(0, output, output.outputs[0])
        ]
        (block,) = [one["content_block"] for one in events if "content_block" in one]
        block["input"] = {"a": 1}
        message_id = events[0]["message"]["id"]
    else:
        body = whole(answer, output)
        (block,), message_id = body["content"], body["id"]
    assert message_id.startswith("msg_")
    assert re.fullmatch("toolu_[a-zA-Z0-9_-]+", block["id"])
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "2"}
    back = {
        "model": "m",
        "max_tokens": 9,
        "messages": [
            TURN,
            {"role": "assistant", "content": [block]},
            {"role": "user", "content": [result]},
        ],
    }
    request = decode(json.dumps(back).encode(), MessagesRequest)
    _, called, result = chat_messages(request)
    assert called.tool_calls is not None
    assert called.tool_calls[0].id == result.tool_call_id
    wanted = "[a-zA-Z0-9]{9}" if name == "mistral" else "call_[0-9a-f]+"
    assert re.fullmatch(wanted, result.tool_call_id or "")


@given(st.text(min_size=1) | st.sampled_from(["functions.f:0", "x_61", "toolu_1", "a1B2c3D4e"]))
def test_a_call_id_is_restored_unchanged(id: str) -> None:
    shown = tool_use_id(id)
    assert re.fullmatch("toolu_[a-zA-Z0-9_-]+", shown)
    assert call_id(shown) == id


@pytest.mark.parametrize("id", ["toolu_01A09q90qw90lq917835lq9", "toolu_", "x", "toolu_x_nothex"])
def test_ids_of_other_servers_are_accepted(id: str) -> None:
    assert call_id(id) == (id.removeprefix("toolu_") or id)


@pytest.mark.parametrize("included", [True, False])
def test_reasoning_is_left_out_on_request(included: bool) -> None:
    texts = ["<think>mm", "m</think>", "yes", ""]
    (_, *before), text = outputs(texts), "".join(texts)
    output = before[-1]
    output.outputs[0] = msgspec.structs.replace(output.outputs[0], text=text)
    (choice,) = whole(chat_answer(include_reasoning=included), output)["choices"]
    assert choice["message"]["content"] == "yes"
    assert choice["message"]["reasoning_content"] == ("mmm" if included else None)
    deltas = [(0, one) for one in outputs(texts)]
    events = stream(chat_answer(include_reasoning=included, return_token_ids=True), deltas, 1)
    said = [event["choices"][0] for event in events]
    assert "".join(one["delta"].get("content") or "" for one in said) == "yes"
    reasoning = "".join(one["delta"].get("reasoning_content") or "" for one in said)
    assert reasoning == ("mmm" if included else "")
    assert [token for one in said for token in one.get("token_ids", [])] == [0, 1, 2, 3]
