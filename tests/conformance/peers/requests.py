"""The bodies that these tests send, and functions that read the answers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx

from tests.conformance.in_process_server import MODEL

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

UPPER = [{"role": "user", "content": "upper: abc"}]
"""nano answers ABC."""
PLAIN: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "upper: abc"},
    CHAT: {"messages": UPPER},
}
"""The minimal body of each path."""

FORM = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
"""A schema that nano can only fill: every text has a maximum length, and no other fields are
allowed."""
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather.", "parameters": FORM},
}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {"deep": {"type": "boolean"}},
            "required": ["deep"],
            "additionalProperties": False,
        },
    },
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = {
    "id": "call_1234567890",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Paris", "unit": "celsius"}'},
}
ANSWERED = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": CALL["id"], "content": "20 degrees"},
]


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


def events(answer: httpx.Response) -> list[Any]:
    """Returns the events of a stream before [DONE]."""
    assert answer.status_code == 200, answer.text
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def choices(chunks: Iterable[Any]) -> list[Any]:
    return [choice for chunk in chunks for choice in chunk["choices"]]


def model_body(**body: Any) -> dict[str, Any]:
    return {"model": MODEL, **body}
