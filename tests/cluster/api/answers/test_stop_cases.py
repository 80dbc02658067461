"""Bodies from `tests/data/cases` whose stop strings, or tokens without text of their own, once got
wrong answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.in_process_server import InProcessServer, start_in_process_server
from tests.model_kinds import model_kind
from tests.support.paths import CASES

pytestmark = pytest.mark.slow

CALL = {"t": "Observation: x"}
BEHIND_REASONING = {
    "qwen3": "f4_stop_in_reasoning.qwen3.chat",
    "gpt_oss": "f4b_stop_in_channel_name.gpt_oss.chat",
}


def case(name: str, **changes: Any) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((CASES / f"{name}.json").read_text())
    return body | changes


def post(server: InProcessServer, path: str, body: dict[str, Any]) -> Any:
    response = server.client.post(f"/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def chunks(server: InProcessServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the events of a stream."""
    response = server.client.post(f"/v1/{path}", json=body | {"stream": True})
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.split("\n") if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def chat(server: InProcessServer, body: dict[str, Any], *, stream: bool) -> dict[str, Any]:
    """Returns the single choice: content, reasoning, arguments of its calls, finish and stop
    reason."""
    if not stream:
        (choice,) = post(server, "chat/completions", body)["choices"]
        message = choice["message"]
        calls = [call["function"]["arguments"] for call in message.get("tool_calls") or []]
        return {
            "content": message["content"] or "",
            "reasoning": message.get("reasoning_content") or "",
            "calls": calls,
            "reasons": (choice["finish_reason"], choice["stop_reason"]),
        }
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for chunk in chunks(server, "chat/completions", body):
        for choice in chunk["choices"]:
            delta = choice["delta"]
            found["content"] += delta.get("content") or ""
            found["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                found["calls"] += [""] * (call["index"] + 1 - len(found["calls"]))
                found["calls"][call["index"]] += call["function"].get("arguments") or ""
            if choice["finish_reason"]:
                found["reasons"] = (choice["finish_reason"], choice["stop_reason"])
    return found


@pytest.fixture(scope="module")
def nano() -> Iterator[InProcessServer]:
    with start_in_process_server() as server:
        yield server


@pytest.fixture(scope="module", params=["qwen3", "gpt_oss"])
def thinking(request: pytest.FixtureRequest) -> Iterator[tuple[str, InProcessServer]]:
    folder = model_kind(request.param).folder()
    with start_in_process_server(folder, **{"model.max_model_len": 2048}) as server:
        yield request.param, server


STREAM = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@STREAM
@pytest.mark.parametrize("name", ["f3_stop_cuts_call.chat", "f4c_stop_in_call_markup.nano.chat"])
def test_a_call_is_whole_in_chat(nano: InProcessServer, name: str, stream: bool) -> None:
    found = chat(nano, case(name), stream=stream)
    assert [json.loads(call) for call in found["calls"]] == [CALL]
    assert found["reasons"] == ("tool_calls", None) and found["content"] == ""


@STREAM
def test_a_call_is_whole_in_responses(nano: InProcessServer, stream: bool) -> None:
    body = case("f3b_stop_cuts_call.responses")
    if stream:
        answer = chunks(nano, "responses", body)[-1]["response"]
    else:
        answer = post(nano, "responses", body)
    (call,) = answer["output"]
    assert json.loads(call["arguments"]) == CALL and answer["status"] == "completed"


@STREAM
def test_a_call_is_whole_in_messages(nano: InProcessServer, stream: bool) -> None:
    body = case("f3_stop_cuts_call.chat")
    (tool,) = body["tools"]
    function = tool["function"]
    request = {
        "model": "nano",
        "messages": body["messages"],
        "temperature": 0,
        "max_tokens": 120,
        "tools": [{"name": function["name"], "input_schema": function["parameters"]}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "stop_sequences": body["stop"],
    }
    if stream:
        events = chunks(nano, "messages", request)
        pieces = [event["delta"].get("partial_json", "") for event in events if "delta" in event]
        written = json.loads("".join(pieces))
        (reason,) = (e["delta"]["stop_reason"] for e in events if e["type"] == "message_delta")
    else:
        answer = post(nano, "messages", request)
        (block,) = answer["content"]
        written, reason = block["input"], answer["stop_reason"]
    assert (written, reason) == (CALL, "tool_use")


@STREAM
def test_a_stop_string_in_hidden_text_changes_nothing(
    thinking: tuple[str, InProcessServer], stream: bool
) -> None:
    """This covers every stop string that occurs in the model's reasoning or in its markers."""
    name, server = thinking
    for seed in (0, 1):
        body = case(BEHIND_REASONING[name], seed=seed)
        plain = chat(server, {key: body[key] for key in body if key != "stop"}, stream=False)
        assert plain["content"] == "OK" and plain["reasons"] == ("stop", None)
        marks = ["<", "think", "<|", "channel", "message", "\n", "final"]
        hidden = [*body["stop"], *marks, plain["reasoning"][:1], plain["reasoning"][-2:]]
        stops = [stop for stop in hidden if stop not in "OK"]
        assert chat(server, body | {"stop": stops}, stream=stream) == plain


@STREAM
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_in_the_content_after_reasoning_cuts(
    thinking: tuple[str, InProcessServer], stream: bool, include: bool
) -> None:
    name, server = thinking
    body = case(
        BEHIND_REASONING[name],
        stop=["two"],
        include_stop_str_in_output=include,
        structured_outputs={"choice": ["one two three"]},
    )
    found = chat(server, body, stream=stream)
    assert found["content"] == ("one two" if include else "one ")
    assert found["reasons"] == ("stop", "two")


@STREAM
@pytest.mark.parametrize("seed", [0, 1])
def test_tokens_of_reasoning_are_counted(
    thinking: tuple[str, InProcessServer], stream: bool, seed: int
) -> None:
    """The count equals the number of tokens in the reasoning text."""
    name, server = thinking
    body = case(BEHIND_REASONING[name], seed=seed, stop=[])
    reasoning = chat(server, body, stream=False)["reasoning"]
    if stream:
        options = {"stream_options": {"include_usage": True}}
        usage = chunks(server, "chat/completions", body | options)[-1]["usage"]
    else:
        usage = post(server, "chat/completions", body)["usage"]
    count = 0
    if reasoning:
        response = server.client.post(
            "/tokenize", json={"prompt": reasoning, "add_special_tokens": False}
        )
        count = min(response.json()["count"], usage["completion_tokens"])
    assert usage["completion_tokens_details"] == {"reasoning_tokens": count}


def test_the_number_of_top_logprobs_is_the_requested_one(nano: InProcessServer) -> None:
    """Each position that has top logprobs has at least the requested number, including the most
    likely token."""
    body = case("f8_top_logprobs_collapse.completions")
    (choice,) = post(nano, "completions", body)["choices"]
    told = choice["logprobs"]
    exact = post(nano, "completions", body | {"return_tokens_as_token_ids": True})
    by_id = exact["choices"][0]["logprobs"]
    assert told["token_logprobs"] == by_id["token_logprobs"]
    assert told["top_logprobs"][0] is None
    for shown, right in zip(told["top_logprobs"][1:], by_id["top_logprobs"][1:], strict=True):
        assert list(shown.values()) == list(right.values()) and len(right) >= 5
    assert told["tokens"][0] == "bytes:\\xc3" and "\ufffd" not in json.dumps(told)
    assert told["text_offset"] == by_id["text_offset"]
