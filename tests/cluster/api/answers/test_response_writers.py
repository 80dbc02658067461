"""The chunks of a stream, joined as clients join them, equal the answer without streaming, for
every split."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from swell.cluster.api.answers.response_writer import ResponseWriter, usage_of
from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.api.chat.writer import ChatResponseWriter
from swell.cluster.api.completions.protocol import CompletionRequest
from swell.cluster.api.completions.writer import CompletionResponseWriter
from swell.cluster.client.requests.outputs import CompletionOutput, RequestOutput
from swell.cluster.text.parsers import make_parser
from swell.cluster.text.schema.decode import decode

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, "</tool_call>"]}}\n</tool_call>'
TEXTS = [
    "plain text",
    "",
    "<think>\nwhy\n</think>\n\nbecause",
    f"first {CALL}",
    f"<think>hm</think>{CALL}\n{CALL}",
    '<tool_call>\n{"name": "f", "arguments": {"a": ',
]


class WordCounter:
    """A tokenizer stand-in that counts words as tokens."""

    def reasoning_tokens(self, texts: Sequence[str], most: int) -> int:
        return min(most, sum(len(text.split()) for text in texts))

    async def reasoning_tokens_offloaded(self, texts: Sequence[str], most: int) -> int:
        return self.reasoning_tokens(texts, most)


def chat_answer(**fields: Any) -> ChatResponseWriter:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    request = decode(json.dumps(body).encode(), ChatCompletionRequest)
    return ChatResponseWriter(
        *("id", "m", request),
        lambda: make_parser("hermes", "think", lambda: "call_1"),
        counter=WordCounter(),
    )


def completion_answer(**fields: Any) -> CompletionResponseWriter:
    body = {"model": "m", "prompt": "x", **fields}
    request = decode(json.dumps(body).encode(), CompletionRequest)
    return CompletionResponseWriter("id", "m", request)


def output(prompt: int, part: CompletionOutput) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt_token_ids=[1] * (prompt + 1),
        prompt=f"<{prompt + 1}>",
        outputs=[part],
        finished=False,
    )


@st.composite
def answers(draw: st.DrawFn, prompts: int, n: int) -> tuple[list[RequestOutput], list[Any]]:
    """Draws whole outputs, one per prompt, and the same outputs as deltas of the choices in random
    order."""
    whole, streams = [], []
    for prompt in range(prompts):
        parts = []
        for index in range(n):
            text = draw(st.sampled_from(TEXTS))
            reason = draw(st.sampled_from(["stop", "length"]))
            cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
            pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            ids = list(range(len(pieces)))
            parts.append(
                CompletionOutput(
                    index=index,
                    text=text,
                    token_ids=ids,
                    num_output_tokens=len(ids),
                    finish_reason=reason,
                )
            )
            deltas = []
            for place, piece in enumerate(pieces):
                last = place == len(pieces) - 1
                part = CompletionOutput(
                    index=index,
                    text=piece,
                    token_ids=[place],
                    num_output_tokens=place + 1,
                    finish_reason=reason if last else None,
                )
                deltas.append((prompt * n + index, output(prompt, part)))
            streams.append(deltas)
        whole.append(output(prompt, parts[0]))
        whole[-1].outputs = parts
    order = draw(st.permutations([i for i, deltas in enumerate(streams) for _ in deltas]))
    return whole, [streams[i].pop(0) for i in order]


def stream(answer: ResponseWriter, deltas: list[Any], choices: int) -> list[dict[str, Any]]:
    async def numbered() -> AsyncIterator[Any]:
        for delta in deltas:
            yield [delta]

    async def read() -> bytes:
        events = answer.stream(numbered(), choices, sent_engines="0", engines=lambda: "0")
        return b"".join([piece async for piece in events])

    *events, done, end = asyncio.run(read()).split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def drawn(outputs: list[RequestOutput]) -> int:
    return sum(part.num_output_tokens for output in outputs for part in output.outputs)


def fold_chat(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Joins the choices of chat chunks as a client does."""
    folded: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
        for choice in chunk["choices"]:
            mine = folded.setdefault(choice["index"], {"text": "", "thought": "", "calls": {}})
            delta = choice["delta"]
            mine["text"] += delta.get("content") or ""
            mine["thought"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                known = mine["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
                known["name"] += call["function"].get("name", "")
                known["arguments"] += call["function"].get("arguments", "")
            if choice["finish_reason"]:
                assert "finish" not in mine and delta == {}
                mine["finish"] = choice["finish_reason"]
    return folded


@settings(max_examples=150, deadline=None)
@given(answers(1, 2), st.booleans())
def test_chat(both: tuple[list[RequestOutput], list[Any]], named: bool) -> None:
    whole, deltas = both
    fields: dict[str, Any] = {"n": 2, "stream": True, "stream_options": {"include_usage": True}}
    if named:
        tool = {"type": "function", "function": {"name": "f"}}
        fields |= {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "f"}}}
    body = msgspec.to_builtins(chat_answer(n=2).full_response(whole, usage_of(whole, drawn(whole))))
    ChatCompletion.model_validate(body, strict=True)
    if named:
        body = msgspec.to_builtins(
            chat_answer(n=2, **{k: fields[k] for k in ("tools", "tool_choice")}).full_response(
                whole, usage_of(whole, drawn(whole))
            )
        )
    chunks = stream(chat_answer(**fields), deltas, 2)
    assert chunks[-1]["usage"] == body["usage"]
    reasoned = [choice["message"]["reasoning_content"] or "" for choice in body["choices"]]
    count = min(drawn(whole), sum(len(text.split()) for text in reasoned))
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
    folded = fold_chat(chunks)
    for choice in body["choices"]:
        mine, message = folded[choice["index"]], choice["message"]
        assert mine["text"] == (message["content"] or "")
        assert mine["thought"] == (message["reasoning_content"] or "")
        calls = [call["function"] for call in message.get("tool_calls", [])]
        assert [mine["calls"][i] for i in sorted(mine["calls"])] == calls
        assert mine["finish"] == choice["finish_reason"]
        if calls:
            assert choice["finish_reason"] != ("tool_calls" if named else "stop")


@settings(max_examples=100, deadline=None)
@given(answers(2, 2), st.booleans(), st.booleans())
def test_completions(both: tuple[list[RequestOutput], list[Any]], echo: bool, ids: bool) -> None:
    whole, deltas = both
    fields = {"n": 2, "echo": echo, "return_token_ids": ids}
    usage = usage_of(whole, drawn(whole))
    body = msgspec.to_builtins(completion_answer(**fields).full_response(whole, usage))
    chunks = stream(
        completion_answer(**fields, stream=True, stream_options={"include_usage": True}), deltas, 4
    )
    assert chunks[-1]["usage"] == body["usage"]
    folded: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            mine = folded.setdefault(choice["index"], {"text": "", "ids": []})
            mine["text"] += choice["text"]
            mine["ids"] += choice.get("token_ids") or []
            mine["finish"] = choice["finish_reason"]
    assert sorted(folded) == [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    for choice in body["choices"]:
        mine = folded[choice["index"]]
        assert mine["text"] == choice["text"]
        assert mine["ids"] == (choice["token_ids"] or [])
        assert mine["finish"] == choice["finish_reason"]
        if echo:
            assert choice["text"].startswith(f"<{choice['index'] // 2 + 1}>")


@pytest.mark.parametrize("streamed", [False, True])
def test_hidden_reasoning_is_counted(streamed: bool) -> None:
    """Hidden reasoning counts as in OpenAI's API, summed over all choices."""
    text = "<think>one two three</think>four"
    parts = [
        CompletionOutput(
            index=index, text=text, token_ids=[1] * 9, num_output_tokens=9, finish_reason="stop"
        )
        for index in range(2)
    ]
    fields: dict[str, Any] = {"n": 2, "include_reasoning": False}
    if streamed:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        deltas = [(part.index, output(2, part)) for part in parts]
        used = stream(chat_answer(**fields), deltas, 2)[-1]["usage"]
    else:
        whole = output(2, parts[0])
        whole.outputs = parts
        answer = chat_answer(**fields).full_response([whole], usage_of([whole], 18))
        used = msgspec.to_builtins(answer)["usage"]
        assert answer.choices[0].message.reasoning_content is None  # type: ignore[attr-defined]
    assert used["completion_tokens_details"] == {"reasoning_tokens": 6}


def test_the_last_chunk_has_all_tokens_that_no_earlier_chunk_had() -> None:
    """If the last output is without text, its tokens are in the last chunk. Otherwise they are in
    the chunk with the text."""

    def last(text: str) -> list[dict[str, Any]]:
        part = CompletionOutput(
            index=0, text=text, token_ids=[7], num_output_tokens=1, finish_reason="stop"
        )
        body = {"stream": True, "return_token_ids": True}
        chunks = stream(chat_answer(**body), [(0, output(2, part))], 1)
        return [chunk["choices"][0] for chunk in chunks]

    _role, end = last("")
    assert (end["delta"], end["token_ids"], end["finish_reason"]) == ({}, [7], "stop")
    _role, text, end = last("a")
    assert (text["delta"], text["token_ids"], text["finish_reason"]) == (
        {"content": "a"},
        [7],
        None,
    )
    assert (end["delta"], end["token_ids"], end["finish_reason"]) == ({}, [], "stop")


def test_usage_counts_a_prompt_once() -> None:
    one = output(4, CompletionOutput(index=0, text="", token_ids=[], num_output_tokens=7))
    usage = usage_of([one], 21)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 21, 26)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_pure_echo_counts_zero_output_tokens(streamed: bool) -> None:
    part = CompletionOutput(
        index=0, text="x", token_ids=[5], num_output_tokens=1, finish_reason="length"
    )
    one = output(2, part)
    fields: dict[str, Any] = {"echo": True, "max_tokens": 0, "return_token_ids": True}
    if not streamed:
        body = msgspec.to_builtins(
            completion_answer(**fields).full_response([one], usage_of([one], 1))
        )
    else:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
        first, last = stream(completion_answer(**fields), [(0, one)], 1)
        body = first | {"usage": last["usage"]}
    (choice,) = body["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("<3>", [], "length")
    assert body["usage"]["completion_tokens"] == 0
