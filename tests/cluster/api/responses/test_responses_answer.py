"""Answers of `/v1/responses`, built by hand and parsed with OpenAI's own types. A stream, joined as
the API specifies, equals the whole response for every split of the answer."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from swell.cluster.api.bodies.protocol_base import usage
from swell.cluster.api.responses.protocol import ResponsesRequest
from swell.cluster.api.responses.response import begin_response
from swell.cluster.api.responses.writer import ResponsesWriter
from swell.cluster.client.requests.outputs import CompletionOutput, LogprobTable, RequestOutput
from swell.cluster.client.requests.request_state import EngineGone
from swell.cluster.text.parsers import make_parser
from swell.cluster.text.tokens.detokenizer import Detokenizer
from swell.cluster.text.tokens.token_texts import TokenTexts
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TOKENIZER = tokenizers_for_tests.chat_tokenizer()
TEXTS = TokenTexts(Detokenizer(TOKENIZER))

CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "ü😀"}}\n</tool_call>'
PIECES = ["<think>", "</think>", "hmm", "\n", CALL, CALL[:40], "the 😀 fox", " ", "<", "tool_call>"]
answers = st.lists(st.sampled_from(PIECES), max_size=7).map("".join)


def cuts(text: str, places: list[int]) -> list[str]:
    edges = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(edges)] or [""]


def make(top_logprobs: int | None = None) -> ResponsesWriter:
    async def finalize() -> None:
        pass

    ids = map("call_{}".format, itertools.count())
    body = ResponsesRequest(model="m", input="hello", metadata={"a": "b"})
    response = begin_response(body, "m", store=True)
    return ResponsesWriter(
        response,
        lambda: make_parser("hermes", "think", lambda: next(ids)),
        finalize,
        top_logprobs,
    )


def output(part: CompletionOutput) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        outputs=[part],
        finished=part.finish_reason is not None,
        num_cached_tokens=2,
    )


def whole(part: CompletionOutput, top_logprobs: int | None = None) -> dict[str, Any]:
    answer = make(top_logprobs)
    used = usage(3, part.num_output_tokens, 2)
    return comparable(answer.full_response([output(part)], used))


def comparable(response: Any) -> dict[str, Any]:
    """A response as JSON, without the fields that differ between two answers."""
    plain: dict[str, Any] = json.loads(msgspec.json.encode(response))
    return nameless(plain)


def nameless(value: Any) -> Any:
    """Removes random ids and times from the body."""
    if isinstance(value, dict):
        drawn = {"id", "item_id", "created_at", "completed_at"}
        return {name: nameless(part) for name, part in value.items() if name not in drawn}
    return [nameless(part) for part in value] if isinstance(value, list) else value


def streamed(
    parts: list[CompletionOutput], top_logprobs: int | None = None, error: Exception | None = None
) -> list[dict[str, Any]]:
    """Returns the events of a stream. Checks each against OpenAI's own types."""

    async def outputs() -> Any:
        for part in parts:
            yield [(0, output(part))]
        if error is not None:
            raise error

    async def read() -> bytes:
        stream = make(top_logprobs).stream(outputs(), 1, sent_engines="0", engines=lambda: "0")
        return b"".join([piece async for piece in stream])

    *blocks, end = asyncio.run(read()).decode().split("\n\n")
    assert end == ""
    events: list[dict[str, Any]] = []
    for one in blocks:
        name, data = one.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENTS.validate_python(event, strict=True)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Builds the response from a stream as a client does. Fails if an event is not where the API
    specifies it."""
    left = iter(events)
    first, second, last = next(left), next(left), events[-1]
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert first["response"] == second["response"] and first["response"]["output"] == []
    items: list[dict[str, Any]] = []
    for event in left:
        if event is last:
            break
        assert event["type"] == "response.output_item.added"
        items.append(folded_item(event, left, len(items)))
    assert last["type"] == "response." + last["response"]["status"]
    assert items == last["response"]["output"]
    return {**first["response"], **last["response"], "output": items}


def folded_item(added: dict[str, Any], left: Iterator[dict[str, Any]], index: int) -> Any:
    """Reads the events of one item until it is done."""
    item = added["item"]
    assert item["status"] == "in_progress"
    if item["type"] == "function_call":
        kind, part, field = "function_call_arguments", item, "arguments"
    else:
        kind = {"message": "output_text", "reasoning": "reasoning_text"}[item["type"]]
        event = next(left)
        assert event["type"] == "response.content_part.added" and item["content"] == []
        part, field = event["part"], "text"
    assert part[field] == ""
    for event in left:
        assert event.get("item_id", item["id"]) == item["id"] and event["output_index"] == index
        if event["type"] != f"response.{kind}.delta":
            break
        assert event["delta"]
        part[field] += event["delta"]
        part.get("logprobs", []).extend(event.get("logprobs", []))
    assert event["type"] == f"response.{kind}.done" and event[field] == part[field]
    assert event.get("logprobs", []) == part.get("logprobs", [])
    if part is not item:
        event = next(left)
        assert event["type"] == "response.content_part.done" and event["part"] == part
        item["content"].append(part)
    event = next(left)
    assert event["type"] == "response.output_item.done"
    return {**item, "status": event["item"]["status"]} if item["id"] == event["item"]["id"] else {}


def deltas(text: str, places: list[int], reason: str) -> list[CompletionOutput]:
    pieces = cuts(text, places)
    return [
        CompletionOutput(
            index=0,
            text=piece,
            token_ids=[7],
            num_output_tokens=count,
            finish_reason=reason if count == len(pieces) else None,
        )
        for count, piece in enumerate(pieces, 1)
    ]


@settings(max_examples=300, deadline=None)
@given(answers, st.lists(st.integers(0, 300), max_size=12), st.sampled_from(["stop", "length"]))
def test_a_stream_folds_to_the_whole(text: str, places: list[int], reason: str) -> None:
    parts = deltas(text, places, reason)
    one = CompletionOutput(
        index=0,
        text=text,
        token_ids=[7] * len(parts),
        num_output_tokens=len(parts),
        finish_reason=reason,
    )
    expected = whole(one)
    got = nameless(folded(streamed(parts)))
    assert got == expected
    Response.model_validate(
        {**expected, "id": "resp_1", "created_at": 5, "output": []}, strict=True
    )
    assert expected["status"] == {"stop": "completed", "length": "incomplete"}[reason]
    statuses = [item["status"] for item in expected["output"]]
    last = "completed" if reason == "stop" else "incomplete"
    assert statuses == ["completed"] * (len(statuses) - 1) + [last]


def test_the_items_of_an_answer() -> None:
    text = f"<think>first\nthen</think>\n\nHello. {CALL}\n{CALL}"
    one = CompletionOutput(
        index=0, text=text, token_ids=[], num_output_tokens=9, finish_reason="stop"
    )
    response = whole(one)
    kinds = [item["type"] for item in response["output"]]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, first, second = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "first\nthen"}]
    assert message["content"][0]["text"].strip() == "Hello."
    assert json.loads(first["arguments"]) == {"at": "ü😀"}
    assert (first["call_id"], second["call_id"]) == ("call_0", "call_1")
    assert response["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 9,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 12,
    }


@pytest.mark.parametrize("text", ["", "<think>only", "half an ans"])
def test_a_response_that_no_engine_could_finish_is_failed(text: str) -> None:
    parts = deltas(text + ".", [len(text)], "stop")[:-1]
    events = streamed(parts, error=EngineGone("the engine burnt"))
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"message": "the engine burnt", "code": "server_error"}
    assert all(item["status"] == "incomplete" for item in last["response"]["output"])
    said = "".join(event.get("delta", "") for event in events)
    assert said == text.removeprefix("<think>")
    held = [part["text"] for item in last["response"]["output"] for part in item["content"]]
    assert "".join(held) == said


def tokens_of(text: str, sizes: list[int]) -> list[int]:
    """Returns tokens that encode a text: single bytes, or the tokenizer's tokens for a few
    characters."""
    tokens: list[int] = []
    at = 0
    for size in itertools.cycle(sizes or [3]):
        if at >= len(text):
            break
        piece = text[at : at + size]
        tokens += TOKENIZER.encode(piece, add_special_tokens=False)
        at += size
    return tokens


def with_logprobs(tokens: list[int], places: list[int], held: int) -> list[CompletionOutput]:
    """Returns the outputs of an answer in steps of several tokens. The text lags by up to `held`
    characters, as it does when a stop string may begin."""
    offsets = TEXTS.offsets([*tokens, 0]).offsets
    text = TOKENIZER.decode(tokens, clean_up_tokenization_spaces=False)
    edges = [*sorted({place % len(tokens) for place in places} - {0}), len(tokens)]
    outputs, begin, shown = [], 0, 0
    for edge in edges:
        ends = edge == len(tokens)
        chars = len(text) if ends else max(shown, offsets[edge] - held)
        ids = [[token, 5] for token in tokens[begin:edge]]
        table = LogprobTable(
            TEXTS, ids, [[-0.5, -1.0]] * len(ids), [1] * len(ids), offsets[begin:edge]
        )
        outputs.append(
            CompletionOutput(
                index=0,
                text=text[shown:chars],
                token_ids=tokens[begin:edge],
                num_output_tokens=edge,
                logprobs=table,
                finish_reason="stop" if ends else None,
            )
        )
        begin, shown = edge, chars
    return outputs


@settings(max_examples=300, deadline=None)
@given(
    answers.filter(bool),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(st.integers(0, 200), max_size=10),
    st.integers(0, 5),
)
@example("</think>\n\n<think>", [2], [], 0)
@example("</think>\n\n", [1], [], 0)
@example("<<think>", [1], [], 0)
@example(f"{CALL}<<think>", [1], [], 0)
def test_logprobs_belong_to_the_tokens_of_the_text(
    text: str, sizes: list[int], places: list[int], held: int
) -> None:
    """The logprobs are the same for every split. The bytes of the tokens contain the text, and
    extend beyond each end of it by less than one token."""
    tokens = tokens_of(text, sizes)
    expected = whole(with_logprobs(tokens, [], 0)[0], top_logprobs=1)
    got = nameless(folded(streamed(with_logprobs(tokens, places, held), top_logprobs=1)))
    assert got == expected
    for item in expected["output"]:
        for part in item["content"] if item["type"] == "message" else ():
            data = bytes(itertools.chain.from_iterable(one["bytes"] for one in part["logprobs"]))
            if part["text"].strip():
                assert part["text"].encode() in data
            inner = part["logprobs"][1:-1]
            written = bytes(itertools.chain.from_iterable(one["bytes"] for one in inner))
            assert written in part["text"].encode()
            assert all(len(one["top_logprobs"]) == 1 for one in part["logprobs"])


def test_markers_are_not_shown() -> None:
    tokens = tokens_of("<think>hm</think>the fox", [1])
    response = whole(with_logprobs(tokens, [], 0)[0], top_logprobs=0)
    (part,) = response["output"][1]["content"]
    assert "".join(one["token"] for one in part["logprobs"]) == "the fox"
