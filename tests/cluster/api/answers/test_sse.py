"""Events equal the encoding of the typed chunks, byte for byte."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET
from openai.types.chat import ChatCompletionChunk

from swell.cluster.api.answers import sse
from swell.cluster.api.answers.logprobs import ChatLogprobs, ChatTokenLogprob, TopLogprob
from swell.cluster.api.answers.sse import TEXT_ONLY, ChunkFields
from swell.cluster.api.bodies.protocol_base import (
    ErrorBody,
    ErrorDetail,
    Usage,
    encode_line,
    named_event,
    usage,
)
from swell.cluster.api.chat.protocol import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    FunctionDelta,
    ToolCallDelta,
)
from swell.cluster.api.chat.writer import ChatStream
from swell.cluster.api.completions.protocol import CompletionChunk, CompletionChunkChoice
from swell.cluster.api.completions.writer import CompletionStream
from swell.cluster.api.messages.message import BlockDelta, TextDelta

TEXT = st.text(max_size=5)
TOP = st.builds(
    TopLogprob, token=TEXT, logprob=st.floats(-50, 0), bytes=st.lists(st.integers(0, 255))
)
LOGPROBS = st.none() | st.builds(
    ChatLogprobs,
    content=st.lists(
        st.builds(
            ChatTokenLogprob,
            token=TEXT,
            logprob=st.floats(-50, 0),
            bytes=st.just([1]),
            top_logprobs=st.lists(TOP, max_size=2),
        ),
        max_size=2,
    ),
    refusal=st.none(),
)
IDS = st.just(UNSET) | st.lists(st.integers(0, 10**6), max_size=3)
USAGES = st.none() | st.builds(usage, st.integers(0, 9), st.integers(0, 9))
RESTS = st.just(TEXT_ONLY) | st.builds(
    ChunkFields,
    logprobs=LOGPROBS,
    finish_reason=st.sampled_from([None, "stop", "length", "tool_calls"]),
    stop_reason=st.none() | st.integers(0, 9) | TEXT,
    token_ids=IDS,
    prompt_token_ids=IDS,
)
DELTAS = st.builds(ChatDelta, reasoning_content=TEXT) | st.builds(
    ChatDelta,
    tool_calls=st.lists(
        st.builds(
            ToolCallDelta, index=st.integers(0, 3), function=st.builds(FunctionDelta, name=TEXT)
        ),
        min_size=1,
        max_size=2,
    ),
)


def payload(event: bytes) -> bytes:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    body = event[6:-2]
    assert b"\n" not in body
    return body


def choice_fields(index: int, rest: ChunkFields) -> dict[str, Any]:
    kept: dict[str, Any] = {"index": index, "logprobs": rest.logprobs}
    kept |= {"finish_reason": rest.finish_reason, "stop_reason": rest.stop_reason}
    return kept | {"token_ids": rest.token_ids}


@settings(max_examples=200, deadline=None)
@given(st.text(), st.integers(0, 9), RESTS, DELTAS, st.booleans(), USAGES, TEXT)
def test_chunks_are_the_typed_ones(
    text: str,
    index: int,
    rest: ChunkFields,
    delta: ChatDelta,
    with_usage: bool,
    used: Usage | None,
    model: str,
) -> None:
    head: dict[str, Any] = {"id": "x-1", "created": 7, "model": model}
    tail = {"usage": used} if with_usage or used else {}
    fields = choice_fields(index, rest)
    typed_choice = CompletionChunkChoice(
        text=text, **fields, prompt_token_ids=rest.prompt_token_ids
    )
    plain = CompletionChunk(**head, choices=[typed_choice], **tail)
    stream = CompletionStream("x-1", 7, model, include_usage=with_usage)
    assert payload(stream.chunk(text, index, rest, used)) == encode_line(plain)
    chats = ChatStream("x-1", 7, model, include_usage=with_usage)
    rest = rest if rest is TEXT_ONLY else msgspec.structs.replace(rest, prompt_token_ids=UNSET)
    for said, got in (
        (ChatDelta(content=text), chats.chunk(text, index, rest, used)),
        (delta, chats.delta(delta, index, rest, used)),
    ):
        chunk = ChatChunk(**head, choices=[ChatChunkChoice(delta=said, **fields)], **tail)
        assert payload(got) == encode_line(chunk)


@settings(max_examples=50, deadline=None)
@given(IDS, USAGES, st.booleans())
def test_the_role_is_the_typed_chunk(ids: Any, used: Usage | None, with_usage: bool) -> None:
    choice = ChatChunkChoice(index=1, delta=ChatDelta(role="assistant", content=""))
    tail = {"usage": used} if with_usage or used else {}
    chunk = ChatChunk(
        id="x-1", created=7, model="m", choices=[choice], prompt_token_ids=ids, **tail
    )
    stream = ChatStream("x-1", 7, "m", include_usage=with_usage)
    event = stream.role(1, None if ids is UNSET else ids, used)
    assert payload(event) == encode_line(chunk)


@pytest.mark.parametrize("with_usage", [True, False])
def test_the_client_reads_a_chat_stream(with_usage: bool) -> None:
    stream = ChatStream("c", 1, "m", include_usage=with_usage)
    events = [
        stream.role(),
        stream.chunk('a "b"\n\u2028'),
        stream.chunk("", 0, ChunkFields(finish_reason="stop")),
    ]
    events += stream.end(usage(1, 2))
    chunks = [ChatCompletionChunk.model_validate_json(payload(event)) for event in events]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:3]) == 'a "b"\n\u2028'
    assert chunks[2].choices[0].finish_reason == "stop"
    assert chunks[3].choices == []
    assert chunks[3].usage is not None
    assert chunks[3].usage.total_tokens == 3
    keys = [json.loads(payload(event)).keys() for event in events]
    assert all(("usage" in key) == with_usage for key in keys[:3])


BREAKS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
"""Characters at which Python's `str.splitlines`, and SSE readers built on it, end a line."""


@settings(max_examples=50, deadline=None)
@given(st.text(st.sampled_from(BREAKS + 'aé😀\\"\u2027\u202a\x84'), max_size=6))
def test_every_reader_reads_event_data_as_one_line(text: str) -> None:
    fields = ChunkFields(stop_reason=text, finish_reason="stop")
    calls = [ToolCallDelta(index=0, function=FunctionDelta(arguments=text))]
    events = {
        ChatStream("i", 7, "m").chunk(text, 0): '{"content"',
        ChatStream("i", 7, text).chunk("", 0, fields): '"stop_reason"',
        ChatStream("i", 7, "m").delta(ChatDelta(tool_calls=calls), 0, TEXT_ONLY): "arguments",
        CompletionStream("i", 7, "m").chunk(text, 0): '"text"',
        sse.event(ErrorBody(error=ErrorDetail(message=text))): "message",
        named_event(BlockDelta(index=0, delta=TextDelta(text=text))): "text_delta",
    }
    for event, holds in events.items():
        *_, data, empty = event.decode().splitlines()
        assert empty == "" and data.startswith("data: ") and holds in data
        assert text in strings(json.loads(data.removeprefix("data: ")))


def strings(value: Any) -> set[str]:
    """Returns every string in a JSON value."""
    if isinstance(value, dict | list):
        inner = value.values() if isinstance(value, dict) else value
        return {one for part in inner for one in strings(part)}
    return {value} if isinstance(value, str) else set()


def test_errors_and_the_end() -> None:
    event = sse.event(ErrorBody(error=ErrorDetail(message="m", type="server_error")))
    assert json.loads(payload(event))["error"]["message"] == "m"
    assert sse.DONE == b"data: [DONE]\n\n"


@pytest.mark.parametrize("version", ["", "2-0f3a91c2d4e5"])
def test_events_name_the_version_once_it_is_known(version: str) -> None:
    """The event equals the typed chunk. An unknown version is omitted."""
    head: dict[str, Any] = {"id": "i", "created": 7, "model": "m"}
    if version:
        head["system_fingerprint"] = version
    chat, text = ChatStream("i", 7, "m"), CompletionStream("i", 7, "m")
    choice = ChatChunkChoice(index=1, delta=ChatDelta(content="a"))
    one = CompletionChunkChoice(index=1, text="a")
    for stream in (chat, text):
        stream.set_version(version)
    assert chat.chunk("a", 1) == sse.event(ChatChunk(**head, choices=[choice]))
    assert text.chunk("a", 1) == sse.event(CompletionChunk(**head, choices=[one]))
    assert chat.end(usage(1, 2)) == [sse.event(ChatChunk(**head, choices=[], usage=usage(1, 2)))]
