"""Mutated bodies: a valid body in which something is replaced, removed, duplicated or broken. The
functions are pure: the same random numbers make the same bodies."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

_MESSAGES = [{"role": "user", "content": "upper: abc"}]
_SCHEMA = {
    "type": "object",
    "properties": {"at": {"type": "integer"}},
    "required": ["at"],
    "additionalProperties": False,
}
_FUNCTION = {"name": "look", "description": "Look.", "parameters": _SCHEMA}
_CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
_COMMON = {"model": "nano", "temperature": 0.5, "top_p": 0.9, "seed": 1, "stream": False}
_SAMPLING = {
    **_COMMON,
    "max_tokens": 3,
    "top_k": 4,
    "min_p": 0.1,
    "min_tokens": 1,
    "stop": ["zz"],
    "stop_token_ids": [3],
    "n": 2,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.5},
    "bad_words": ["q"],
    "allowed_token_ids": [5, 6, 7],
    "ignore_eos": True,
    "return_token_ids": True,
    "priority": 1,
    "cache_salt": "s",
    "data_parallel_rank": 0,
}

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {**_SAMPLING, "prompt": "hi"}),
    (
        "/v1/completions",
        {
            **_COMMON,
            "prompt": [[5, 6], [7]],
            "max_tokens": 2,
            "best_of": 2,
            "logprobs": 2,
            "echo": True,
            "prompt_logprobs": 1,
        },
    ),
    (
        "/v1/completions",
        {
            **_COMMON,
            "prompt": ["a", "b"],
            "max_tokens": 3,
            "stream": True,
            "stream_options": {"include_usage": True},
            "structured_outputs": {"regex": "[a-c]+"},
        },
    ),
    ("/v1/chat/completions", {**_SAMPLING, "messages": _MESSAGES}),
    (
        "/v1/chat/completions",
        {
            **_COMMON,
            "messages": [
                *_MESSAGES,
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "x"}]},
            ],
            "tools": [{"type": "function", "function": _FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "look"}},
            "parallel_tool_calls": False,
            "max_completion_tokens": 6,
            "logprobs": True,
            "top_logprobs": 2,
        },
    ),
    (
        "/v1/chat/completions",
        {
            **_COMMON,
            "messages": _MESSAGES,
            "max_tokens": 4,
            "stream": True,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": _SCHEMA, "strict": True},
            },
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ),
    (
        "/v1/responses",
        {
            "model": "nano",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "x"},
            ],
            "instructions": "be brief",
            "tools": [{"type": "function", "name": "look", "parameters": _SCHEMA}],
            "tool_choice": "auto",
            "max_output_tokens": 4,
            "store": True,
            "stream": True,
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 1,
        },
    ),
    (
        "/v1/responses",
        {
            "model": "nano",
            "input": "hi",
            "max_output_tokens": 4,
            "background": False,
            "previous_response_id": None,
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}},
        },
    ),
    (
        "/v1/messages",
        {
            "model": "nano",
            "max_tokens": 4,
            "system": [{"type": "text", "text": "be brief"}],
            "messages": [
                *_MESSAGES,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}],
                },
            ],
            "tools": [{"name": "look", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "any"},
            "stop_sequences": ["zz"],
            "stream": True,
        },
    ),
    (
        "/v1/messages",
        {
            "model": "nano",
            "max_tokens": 4,
            "messages": _MESSAGES,
            "thinking": {"type": "disabled"},
            "output_config": {"format": {"type": "json_schema", "schema": _SCHEMA}},
        },
    ),
    ("/v1/messages/count_tokens", {"model": "nano", "messages": _MESSAGES, "system": "be brief"}),
    ("/tokenize", {"model": "nano", "prompt": "hi", "return_token_strs": True}),
    ("/tokenize", {"messages": _MESSAGES, "tools": [{"type": "function", "function": _FUNCTION}]}),
    ("/detokenize", {"model": "nano", "tokens": [5, 6, 7]}),
    ("/admin/scale", {"engines": 1, "drain_timeout_s": 1.5}),
    ("/admin/drain", {"rank": 0}),
]
"""(path, a valid body of it); together they contain nearly every field."""

STRANGE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 2**31, -(2**31) - 1, 2**63, 2**64, 10**400, 0.5, -0.0),
    *(1e-320, 1e308, "", " ", "\x00", "a", "0", "\U0001f600", "\u202e", "\uffff", "{{", "{% if"),
    *("[", "(a+)+$", "\\", "a" * 5000, "<|im_end|>", "<tool_call>", "root ::= root", "🧑‍🚀" * 40),
    *([], [None], [[]], [0] * 300, ["a"] * 20, {}, {"": 0}, {"type": "object"}, {"$ref": "#"}),
    *({"type": "text"}, {"a": {"a": {"a": [{}]}}}, {"anyOf": []}, [{"role": "user"}]),
]
_BYTES = [b"", b"\x00", b"\xff", b"\xed\xa0\x80", b"NaN", b"1e999", b'"', b"{", b"]", b",", b"\\u"]


def mutated(source: random.Random, body: dict[str, Any]) -> bytes:
    """Returns a body some mutations away from `body`; one in four is broken as text too."""
    changed = copy.deepcopy(body)
    for _ in range(source.choice((1, 1, 1, 2, 4))):
        _step(source, changed)
    text = json.dumps(changed, ensure_ascii=source.random() < 0.5).encode()
    if source.random() < 0.25:
        at = source.randrange(len(text) + 1)
        text = text[:at] + source.choice(_BYTES) + text[at + source.choice((0, 0, 1, 7)) :]
    return text


def _step(source: random.Random, body: dict[str, Any]) -> None:
    places = list(_places(body))
    if not places:
        return
    home, key = source.choice(places)
    match source.randrange(6):
        case 0:
            del home[key]
        case 1:
            other, there = source.choice(places)
            home[key] = copy.deepcopy(other[there])
        case 2 if isinstance(home, dict):
            home[source.choice(("extra", "type", "content", "$ref", ""))] = _strange(source)
        case 3 if isinstance(home, list):
            home += copy.deepcopy(home) * source.choice((1, 1, 50))
        case _:
            home[key] = _strange(source)


def _strange(source: random.Random) -> Any:
    return copy.deepcopy(source.choice(STRANGE))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every (container, key) of a JSON value."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])
