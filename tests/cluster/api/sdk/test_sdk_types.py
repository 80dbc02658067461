"""Answers and their events match the types of OpenAI's and Anthropic's own clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.cluster.fake_cluster import FakeCluster
from tests.model_kinds import model_kind

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FLAT = {"name": "f", "parameters": SCHEMA}
USER = [{"role": "user", "content": "x"}]
USAGE = {"include_usage": True, "continuous_usage_stats": True}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
TYPES: dict[str, tuple[Any, Any]] = {
    CHAT: (ChatCompletion, ChatCompletionChunk),
    COMPLETIONS: (Completion, Completion),
    RESPONSES: (Response, ResponseStreamEvent),
    MESSAGES: (Message, RawMessageStreamEvent),
}
"""Types of whole answers and of stream events."""
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 50},
    COMPLETIONS: {"prompt": "x", "max_tokens": 50},
    RESPONSES: {"input": "x", "max_output_tokens": 50, "store": False},
    MESSAGES: {"messages": USER, "max_tokens": 2000},
}
MORE: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {},
        {"n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        {"tools": [{"type": "function", "function": FLAT}]},
        {"max_tokens": 2, "include_reasoning": False},
    ],
    COMPLETIONS: [{"n": 2, "return_token_ids": True}, {"logprobs": 2}],
    RESPONSES: [LOGPROBS, {"tools": [{"type": "function", **FLAT}]}, {"max_output_tokens": 16}],
    MESSAGES: [
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"tools": [{"name": "f", "input_schema": SCHEMA}]},
        {"max_tokens": 2},
    ],
}


def events(text: str) -> Iterator[dict[str, Any]]:
    for line in text.split("\n"):
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def as_sdk_has_it(body: dict[str, Any]) -> dict[str, Any]:
    """Fills in the finish reason of unfinished choices. OpenAI's own API omits it until the last
    chunk of a completion, but its type requires it."""
    if body.get("object") == "text_completion":
        for choice in body["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
    return body


@pytest.mark.parametrize("path", TYPES)
def test_answers_match_the_clients_types(path: str) -> None:
    qwen = model_kind("qwen3")
    whole, event = map(TypeAdapter, TYPES[path])
    text = f"<think>\nhm\n</think>\n\n{CALL}\n{CALL}"
    script = qwen.tokenizer.encode(text, add_special_tokens=False)
    script += [qwen.tokenizer.eos_token_id] * 2

    async def scenario() -> None:
        cluster = FakeCluster(
            Path(qwen.folder()),
            script,
            vocab_size=len(qwen.tokenizer),
            **{"serve.stored_responses": 0},
        )
        async with cluster.serving():
            await cluster.join(0)
            for more in MORE[path]:
                payload = {**LEAST[path], **more}
                answer = await cluster.client.post(path, json=payload)
                assert answer.status_code == 200, answer.text
                whole.validate_python(as_sdk_has_it(answer.json()))
                options = USAGE if path in (CHAT, COMPLETIONS) else None
                streams = [
                    {**payload, "stream": True},
                    {**payload, "stream": True, "stream_options": options},
                ]
                for streamed in streams[: 2 if options else 1]:
                    answer = await cluster.client.post(path, json=streamed)
                    assert answer.status_code == 200, answer.text
                    said = [event.validate_python(as_sdk_has_it(e)) for e in events(answer.text)]
                    if options:
                        usages = {getattr(one, "usage", None) is not None for one in said}
                        assert usages == {"stream_options" in streamed}

    asyncio.run(scenario())
