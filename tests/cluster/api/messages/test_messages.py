"""Anthropic's API, checked with Anthropic's own client: its types, its errors, and how it joins a
stream into a message."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter

from swell.cluster.api.answers.response_writer import stream_usage, usage_of
from swell.cluster.api.bodies.http_errors import error_info
from swell.cluster.api.messages.protocol import MessagesRequest
from swell.cluster.api.messages.writer import MessagesResponseWriter
from swell.cluster.client.requests.outputs import CompletionOutput, RequestOutput
from swell.cluster.client.requests.request_state import EngineGone
from swell.cluster.text.parsers import make_parser
from swell.cluster.text.parsers.base import Parser
from swell.cluster.text.schema.decode import decode
from tests.cluster.fake_cluster import FakeCluster
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "2 + 2?"}]
ADD = {"name": "add", "input_schema": {"type": "object", "properties": {"a": {}}}}


def payload(**fields: object) -> MessagesRequest:
    body = {"model": "fake", "messages": QUESTION, "max_tokens": 9, **fields}
    return decode(json.dumps(body).encode(), MessagesRequest)


_adapter = functools.cache(TypeAdapter)


def strictly(kind: Any, body: Any) -> Any:
    """Returns the body as the client's own type. Fails if it has unknown fields."""
    value = _adapter(kind).validate_python(body, strict=True)
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, BaseModel):
            assert not part.model_extra, part
            stack += [getattr(part, name) for name in type(part).model_fields]
        elif isinstance(part, list):
            stack += part
    return value


# ------------------------------------------------------------------------------------ the answer


def parser() -> Parser:
    return make_parser("hermes", "think", map("call_{}".format, itertools.count()).__next__)


def output(text: str, tokens: int, reason: str | None, stop: str | None) -> RequestOutput:
    part = CompletionOutput(
        index=0,
        text=text,
        token_ids=[],
        num_output_tokens=tokens,
        finish_reason=reason,
        stop_reason=stop,
    )
    return RequestOutput(
        request_id="r",
        prompt_token_ids=[1] * 7,
        outputs=[part],
        finished=reason is not None,
        num_cached_tokens=4,
    )


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """Parses a stream as the client does, and checks that each event's name is the type in its
    data."""
    found = re.findall(rb"event: (\w+)\ndata: (.*)\n\n", stream)
    assert b"".join(b"event: %b\ndata: %b\n\n" % pair for pair in found) == stream
    events = [json.loads(data) for _, data in found]
    assert [event["type"] for event in events] == [name.decode() for name, _ in found]
    return events


_TEXTS = st.lists(
    st.sampled_from(
        [
            *("<think>", "</think>", "\n", "hm", "It is 4.", "<tool_call>", "</tool_call>"),
            *('{"name": "add", "arguments": ', '{"a": 1, "b": "x', '"}', "}", "oops", "{}", '"q"'),
        ]
    ),
    max_size=14,
).map("".join)
_ENDS = st.sampled_from([("stop", None), ("stop", "END"), ("length", None)])
_BLOCKS = re.compile(r"(start (delta )+stop )*\Z")


@settings(max_examples=400, deadline=None)
@given(_TEXTS, st.lists(st.integers(0, 60)), _ENDS, st.sampled_from([None, "omitted"]))
def test_a_stream_folded_by_the_client_is_the_whole_answer(
    text: str, cuts: list[int], end: tuple[str, str | None], display: str | None
) -> None:
    body = payload(thinking={"type": "adaptive", "display": display})
    last = output(text, 9, *end)
    whole = MessagesResponseWriter("r", "fake", body, parser).full_response(
        [last], usage_of([last], 9)
    )
    plain = msgspec.to_builtins(whole)
    strictly(Message, plain)

    answer = MessagesResponseWriter("r", "fake", body, parser)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    deltas = [output(piece, 1 + at, None, None) for at, piece in enumerate(pieces[:-1])]
    deltas.append(output(pieces[-1], 9, *end))
    sent = b"".join(b"".join(answer.delta(0, one, one.outputs[0])) for one in deltas)
    events = events_of(sent + b"".join(answer.stream_end(stream_usage({0: deltas[-1]}, 1))))

    folded: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        typed = strictly(RawMessageStreamEvent, event)
        folded = accumulate_event(event=typed, current_snapshot=folded, json_bufs=buffers)
    assert {name: value for name, value in folded.to_dict().items() if value is not None} == {
        name: value for name, value in plain.items() if value is not None
    }
    kinds = [event["type"] for event in events]
    assert (kinds[0], *kinds[-2:]) == ("message_start", "message_delta", "message_stop")
    inner = events[1:-2]
    assert _BLOCKS.match("".join(e["type"].removeprefix("content_block_") + " " for e in inner))
    starts = itertools.accumulate(event["type"] == "content_block_start" for event in inner)
    assert [event["index"] for event in inner] == [started - 1 for started in starts]


def test_the_input_of_each_of_several_calls_is_one_object() -> None:
    """The SDK reads the first value of a buffer and ignores the rest. Other clients do not."""
    wanted = ['{"a": 1}', "{}", '{"b": [2]}']
    text = "".join(
        f'<tool_call>{{"name": "add", "arguments": {one}}}</tool_call>' for one in wanted
    )
    answer = MessagesResponseWriter("r", "fake", payload(), parser)
    last = output(text, 9, "stop", None)
    inputs: dict[int, str] = {}
    for event in events_of(b"".join(answer.delta(0, last, last.outputs[0]))):
        if event["type"] == "content_block_delta":
            index = event["index"]
            inputs[index] = inputs.get(index, "") + event["delta"]["partial_json"]
    assert [json.loads(one) for one in inputs.values()] == [json.loads(one) for one in wanted]


@pytest.mark.parametrize(
    ("text", "tokens", "end", "reason"),
    [
        ("4", 3, ("stop", None), "end_turn"),
        ("4", 3, ("stop", "END"), "stop_sequence"),
        ("4", 9, ("length", None), "max_tokens"),
        ("4", 8, ("length", None), "model_context_window_exceeded"),
        ('<tool_call>{"name": "add", "arguments": {}}', 3, ("stop", None), "tool_use"),
        ('<tool_call>{"name": "add", "arguments": {', 9, ("length", None), "max_tokens"),
    ],
)
def test_stop_reasons(text: str, tokens: int, end: Any, reason: str) -> None:
    last = output(text, tokens, *end)
    whole = MessagesResponseWriter("r", "fake", payload(), parser).full_response(
        [last], usage_of([last], tokens)
    )
    assert isinstance(whole, msgspec.Struct)
    plain = msgspec.to_builtins(whole)
    assert (plain["stop_reason"], plain["stop_sequence"]) == (reason, end[1])
    assert plain["usage"] == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": tokens,
    }


def test_a_failure_ends_a_stream_with_an_error() -> None:
    answer = MessagesResponseWriter("r", "fake", payload(), parser)
    (event,) = events_of(b"".join(answer.stream_error(error_info(EngineGone("lost")))))
    error = strictly(ErrorResponse, event)
    assert (error.error.type, error.error.message, error.request_id) == ("api_error", "lost", "r")


# ------------------------------------------------------------------- the client against an ingress

TEMPLATE = (
    "{% for t in tools or [] %}<tool>{{ t.function.name }}</tool>{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = 'Wait.\n<tool_call>\n{"name": "add", "arguments": {"a": [2, "x"]}}\n</tool_call>'
Scenario = Callable[[FakeCluster, anthropic.AsyncAnthropic], Awaitable[None]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def run_scenario(
    folder: Path, scenario: Scenario, reply: str = "It is 4.", **options: object
) -> None:
    """Runs the scenario with the client and one engine that always gives the same answer."""
    tokenizer = tokenizers_for_tests.chat_tokenizer(TEMPLATE)
    tokenizer.save_pretrained(folder)
    script = [*tokenizer.encode(reply), tokenizer.eos_token_id]

    async def run() -> None:
        async with FakeCluster(folder, script, **options).serving() as cluster:
            url = str(cluster.client.base_url)
            async with anthropic.AsyncAnthropic(
                base_url=url, api_key="alpha", max_retries=0
            ) as client:
                await scenario(cluster, client)

    asyncio.run(run())


NO_ENGINE_SOON = {"serve.no_engine_timeout_s": 0.1, "cluster.start_timeout_s": 0.3}
REQUEST: dict[str, Any] = {"model": "fake", "max_tokens": 90, "messages": QUESTION}


def test_answers_whole_and_streamed(folder: Path) -> None:
    async def scenario(cluster: FakeCluster, client: anthropic.AsyncAnthropic) -> None:
        await cluster.join(0)
        raw = await client.messages.with_raw_response.create(**REQUEST)
        whole = strictly(Message, raw.http_response.json())
        assert [block.type for block in whole.content] == ["thinking", "text"]
        assert (whole.content[0].thinking, whole.content[1].text) == ("hm", "It is 4.")
        assert whole.stop_reason == "end_turn" and whole.model == "fake"
        assert raw.headers["request-id"] == raw.headers["x-request-id"] == whole.id[4:]
        async with client.messages.stream(**REQUEST) as stream:
            texts = [text async for text in stream.text_stream]
            final = await stream.get_final_message()
        assert "".join(texts) == "It is 4."
        assert [b.to_dict() for b in final.content] == [b.to_dict() for b in whole.content]
        assert final.stop_reason == whole.stop_reason
        assert final.usage == whole.usage

    run_scenario(folder, scenario, reply="<think>\nhm\n</think>\n\nIt is 4.")


def test_calls_of_tools_and_their_results(folder: Path) -> None:
    async def scenario(cluster: FakeCluster, client: anthropic.AsyncAnthropic) -> None:
        engine = await cluster.join(0)
        whole = await client.messages.create(**REQUEST, tools=[ADD])
        text, call = whole.content
        assert (text.type, call.type, whole.stop_reason) == ("text", "tool_use", "tool_use")
        assert call.type == "tool_use" and call.input == {"a": [2, "x"]}
        async with client.messages.stream(**REQUEST, tools=[ADD]) as stream:
            final = await stream.get_final_message()
        assert final.content[1].type == "tool_use" and final.content[1].input == call.input
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "4"}
        answered = [
            *QUESTION,
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": [result]},
        ]
        await client.messages.create(**{**REQUEST, "messages": answered}, tools=[ADD])
        tokenizer = tokenizers_for_tests.chat_tokenizer()
        called = '<tool_call>{"name": "add", "arguments": {"a": [2, "x"]}}</tool_call>'
        assert tokenizer.decode(engine.arrived[-1].prompt_token_ids) == (
            "<tool>add</tool><|im_start|>user\n2 + 2?<|im_end|>\n"
            f"<|im_start|>assistant\nWait.{called}<|im_end|>\n"
            "<|im_start|>tool\n4<|im_end|>\n<|im_start|>assistant\n"
        )

    run_scenario(folder, scenario, reply=CALL)


def test_stop_sequences_and_limits(folder: Path) -> None:
    async def scenario(cluster: FakeCluster, client: anthropic.AsyncAnthropic) -> None:
        await cluster.join(0)
        stopped = await client.messages.create(**REQUEST, stop_sequences=["x", "is"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "is")
        assert stopped.content[0].type == "text" and stopped.content[0].text == "It "
        short = await client.messages.create(**{**REQUEST, "max_tokens": 2})
        assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)
        long = {"messages": [{"role": "user", "content": "q" * 1980}], "max_tokens": 5000}
        count = (
            await client.messages.count_tokens(model="fake", messages=long["messages"])
        ).input_tokens
        full = await client.messages.create(**{**REQUEST, **long})
        assert full.stop_reason == "model_context_window_exceeded"
        assert (full.usage.input_tokens, full.usage.output_tokens) == (count, 2000 - count)

    run_scenario(folder, scenario)


def test_count_tokens_equals_the_prompt_tokens(folder: Path) -> None:
    question: dict[str, Any] = {
        "model": "fake",
        "messages": QUESTION,
        "tools": [ADD],
        "system": "Hi.",
    }

    async def scenario(cluster: FakeCluster, client: anthropic.AsyncAnthropic) -> None:
        engine = await cluster.join(0)
        raw = await client.messages.with_raw_response.count_tokens(**question)
        count = strictly(MessageTokensCount, raw.http_response.json())
        await client.messages.create(**question, max_tokens=3)
        assert count.input_tokens == len(engine.arrived[0].prompt_token_ids)

    run_scenario(folder, scenario)


@pytest.mark.parametrize(
    ("fields", "kind", "type"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error"),
        ({"extra_body": {"top_k": -7}}, anthropic.BadRequestError, "invalid_request_error"),
        ({"system": "long " * 999}, anthropic.ContentTooLargeError, "request_too_large"),
    ],
)
def test_errors_have_the_types_of_the_client(
    folder: Path, fields: dict[str, Any], kind: type[anthropic.APIStatusError], type: str
) -> None:
    async def scenario(cluster: FakeCluster, client: anthropic.AsyncAnthropic) -> None:
        await cluster.join(0)
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                await client.messages.create(**{**REQUEST, **fields}, stream=stream)
            if type != "request_too_large":  # the client's own types lack this one
                strictly(ErrorResponse, caught.value.body)
            assert caught.value.type == type
            assert caught.value.request_id == caught.value.body["request_id"]

    run_scenario(folder, scenario, **{"serve.max_body_bytes": 4000})


def test_a_cluster_without_engines_answers_overloaded_error(folder: Path) -> None:
    async def scenario(cluster: FakeCluster, client: anthropic.AsyncAnthropic) -> None:
        with pytest.raises(anthropic.OverloadedError) as caught:
            await client.messages.create(**REQUEST)
        assert caught.value.type == "overloaded_error"
        assert caught.value.response.headers["retry-after"] == "1"

    run_scenario(folder, scenario, **NO_ENGINE_SOON)


def test_a_broken_stream_raises_in_the_client(folder: Path) -> None:
    async def scenario(cluster: FakeCluster, client: anthropic.AsyncAnthropic) -> None:
        engine = await cluster.join(0, steps=3)
        async with client.messages.stream(**REQUEST) as stream:
            assert (await anext(stream)).type == "message_start"
            await cluster.kill(engine)
            with pytest.raises(anthropic.APIStatusError) as caught:
                await stream.get_final_message()
        assert caught.value.type == "overloaded_error"

    run_scenario(folder, scenario, **NO_ENGINE_SOON)


def test_either_key_header_is_accepted(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "users"
    keys.write_text("alpha\n")

    async def scenario(cluster: FakeCluster, client: anthropic.AsyncAnthropic) -> None:
        await cluster.join(0)
        assert (await client.messages.create(**REQUEST)).stop_reason == "end_turn"
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.with_options(api_key="beta").messages.create(**REQUEST)
        assert caught.value.type == "authentication_error"
        for header, status in (
            ({"x-api-key": "alpha"}, 200),
            ({"x-api-key": "beta"}, 401),
            ({}, 401),
        ):
            answer = await cluster.client.post("/v1/messages", json=REQUEST, headers=header)
            assert answer.status_code == status

    run_scenario(folder, scenario, **{"serve.api_keys_file": str(keys)})


def test_routes_that_do_not_exist_answer_in_the_same_shape(folder: Path) -> None:
    async def scenario(cluster: FakeCluster, client: anthropic.AsyncAnthropic) -> None:
        for path, status in (("/v1/messages/batches", 404), ("/v1/messages", 405)):
            answer = await cluster.client.get(path)
            assert answer.status_code == status
            strictly(ErrorResponse, answer.json())
        assert "type" not in (await cluster.client.get("/v1/messagesx")).json()

    run_scenario(folder, scenario)
