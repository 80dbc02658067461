"""Events equal what the typed chunks encode to, byte for byte."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk

from swell.cluster import sse
from swell.cluster.openai import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    CompletionChunk,
    CompletionChunkChoice,
    ErrorBody,
    ErrorDetail,
    usage,
)

FIELDS: dict[str, Any] = {
    "text": st.text(),
    "index": st.integers(0, 9),
    "finish_reason": st.sampled_from([None, "stop", "length", "abort"]),
    "stop_reason": st.none() | st.integers(0, 9) | st.text(max_size=5),
    "token_ids": st.none() | st.lists(st.integers(0, 10**6), max_size=3),
}


def payload(event: bytes) -> bytes:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    body = event[6:-2]
    assert b"\n" not in body
    return body


def choice_fields(fields: dict[str, Any]) -> dict[str, Any]:
    kept = {name: fields[name] for name in ("index", "finish_reason", "stop_reason")}
    if fields["token_ids"] is not None:
        kept["token_ids"] = fields["token_ids"]
    return kept


@settings(max_examples=200, deadline=None)
@given(st.fixed_dictionaries(FIELDS), st.booleans(), st.text(max_size=5))
def test_chunks_are_the_typed_ones(fields: dict[str, Any], with_usage: bool, model: str) -> None:
    if fields["finish_reason"] is None:
        fields["stop_reason"] = None  # nothing has ended the answer
    head: dict[str, Any] = {"id": "x-1", "created": 7, "model": model}
    tail = {"usage": None} if with_usage else {}
    plain = CompletionChunk(
        **head,
        choices=[CompletionChunkChoice(text=fields["text"], **choice_fields(fields))],
        **tail,
    )
    stream = sse.CompletionStream("x-1", 7, model, include_usage=with_usage)
    assert payload(stream.chunk(**fields)) == msgspec.json.encode(plain)
    chat = ChatChunk(
        **head,
        choices=[ChatChunkChoice(delta=ChatDelta(content=fields["text"]), **choice_fields(fields))],
        **tail,
    )
    chat_stream = sse.ChatStream("x-1", 7, model, include_usage=with_usage)
    assert payload(chat_stream.chunk(**fields)) == msgspec.json.encode(chat)


@pytest.mark.parametrize("with_usage", [True, False])
def test_a_chat_stream_as_the_client_reads_it(with_usage: bool) -> None:
    stream = sse.ChatStream("c", 1, "m", include_usage=with_usage)
    events = [stream.role(), stream.chunk('a "b"\n\u2028'), stream.chunk("", finish_reason="stop")]
    events.append(stream.usage(usage(1, 2)))
    chunks = [ChatCompletionChunk.model_validate_json(payload(event)) for event in events]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:3]) == 'a "b"\n\u2028'
    assert chunks[2].choices[0].finish_reason == "stop"
    assert chunks[3].choices == []
    assert chunks[3].usage is not None
    assert chunks[3].usage.total_tokens == 3
    keys = [json.loads(payload(event)).keys() for event in events]
    assert all(("usage" in key) == with_usage for key in keys[:3])


def test_errors_and_the_end() -> None:
    event = sse.error_event(ErrorBody(error=ErrorDetail(message="m", type="server_error")))
    assert json.loads(payload(event))["error"]["message"] == "m"
    assert sse.DONE == b"data: [DONE]\n\n"
