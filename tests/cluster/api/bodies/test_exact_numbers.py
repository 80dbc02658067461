"""Numbers that no double holds are exact in a schema, in every field that holds one, or are refused
by name. In other fields they are floats."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.cluster.api.bodies.test_request_forms import BODIES, JSON
from tests.cluster.api.bodies.test_wrong_values import fields_of_bodies
from tests.cluster.fake_cluster import FakeCluster
from tests.cluster.store_handle import StoreOfTest
from tests.cluster.text import tokenizers_for_tests
from tests.conformance.in_process_server import InProcessServer, start_in_process_server

pytestmark = pytest.mark.slow

CONST = Decimal("1234567890123456789.0")
DIVISOR = Decimal("0.1000000000000000000000001")
write = msgspec.json.Encoder(decimal_format="number").encode


@pytest.fixture(scope="module")
def nano() -> Iterator[InProcessServer]:
    with start_in_process_server(**{"model.max_model_len": 1024}) as server:
        yield server
        server.wait_idle()


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}


def as_text(schema: Any) -> str:
    return write(schema).decode()


TURNS = {"messages": [{"role": "user", "content": "upper: abc"}], "max_tokens": 100}
PROMPT = {"prompt": "abc", "max_tokens": 100}
INPUT = {"input": "upper: abc", "max_output_tokens": 100}
FIELDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "response_format": lambda schema: {"response_format": form(schema)},
    "structured_outputs": lambda schema: {"structured_outputs": {"json": schema}},
    "text in structured_outputs": lambda one: {"structured_outputs": {"json": as_text(one)}},
    "guided_json": lambda schema: {"guided_json": schema},
    "text in guided_json": lambda schema: {"guided_json": as_text(schema)},
    "text in json_schema": lambda schema: {"json_schema": as_text(schema)},
}
PLACES: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    **{
        f"{path} {name}": (path, lambda schema, field=field, plain=plain: plain | field(schema))
        for path, plain in (("completions", PROMPT), ("chat/completions", TURNS))
        for name, field in FIELDS.items()
    },
    "chat/completions tools": (
        "chat/completions",
        lambda schema: {
            **TURNS,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
            "tool_choice": "required",
        },
    ),
    "responses text": (
        "responses",
        lambda schema: {
            **INPUT,
            "text": {"format": {"type": "json_schema", "name": "f", "schema": schema}},
        },
    ),
    "responses tools": (
        "responses",
        lambda schema: {
            **INPUT,
            "tools": [{"type": "function", "name": "f", "parameters": schema}],
            "tool_choice": "required",
        },
    ),
    "messages output_config": (
        "messages",
        lambda schema: {
            **TURNS,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
    ),
    "messages tools": (
        "messages",
        lambda schema: {
            **TURNS,
            "tools": [{"name": "f", "input_schema": schema}],
            "tool_choice": {"type": "any"},
        },
    ),
}
"""Name of a field that holds a schema -> path, and a function that makes the body."""


def post(server: InProcessServer, name: str, schema: Any) -> httpx.Response:
    path, make = PLACES[name]
    body = write({"model": "nano", **make(schema)})
    return server.client.post(f"/v1/{path}", content=body, headers=JSON)


def answered(name: str, answer: Any) -> Any:
    """Returns the JSON that the model wrote: its text, or the arguments of its call."""
    is_call = name.endswith("tools")
    match name.split()[0]:
        case "completions":
            return json.loads(answer["choices"][0]["text"])
        case "chat/completions":
            message = answer["choices"][0]["message"]
            call = message["tool_calls"][0]["function"]["arguments"] if is_call else None
            return json.loads(call or message["content"])
        case "responses":
            (item,) = answer["output"]
            return json.loads(item["arguments"] if is_call else item["content"][0]["text"])
    (block,) = answer["content"]
    return block["input"] if is_call else json.loads(block["text"])


def schema_of(number: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"v": number}, "required": ["v"]} | {
        "additionalProperties": False
    }


@pytest.mark.parametrize("name", PLACES)
def test_a_number_of_a_schema_is_exact(nano: InProcessServer, name: str) -> None:
    answer = post(nano, name, schema_of({"const": CONST}))
    assert answer.status_code == 200, answer.text
    assert answered(name, answer.json()) == {"v": int(CONST)}


@pytest.mark.parametrize("name", PLACES)
def test_a_number_that_cannot_be_enforced_is_refused_by_name(
    nano: InProcessServer, name: str
) -> None:
    answer = post(nano, name, schema_of({"type": "number", "multipleOf": DIVISOR}))
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert f"properties.v.multipleOf={DIVISOR}," in message
    assert "'f'" in message if name.endswith("tools") else True
    beyond = post(nano, name, schema_of({"type": "number", "minimum": Decimal("-1e-9999999")}))
    assert beyond.status_code == 400, beyond.text
    assert "at properties.v has the number -1E-9999999, " in beyond.json()["error"]["message"]
    assert "at most 400" in beyond.json()["error"]["message"]


@pytest.mark.parametrize("name", ["responses text", "responses tools"])
def test_a_response_repeats_a_schema_as_it_was_sent(nano: InProcessServer, name: str) -> None:
    sent = {"const": CONST, "title": "x", "examples": [Decimal("0.1234567890123456789")]}
    answer = post(nano, name, schema_of(sent))
    assert answer.status_code == 200, answer.text
    stored = nano.client.get(f"/v1/responses/{answer.json()['id']}")
    for one in (answer, stored):
        assert f'"schema":{as_text(schema_of(sent))}' in one.text.replace("parameters", "schema")


def test_no_field_depends_on_the_length_of_a_number(tmp_path: Path) -> None:
    """An answer to a body with a number of many digits has the status of that with a double."""
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    numbers = ("0.1234567890123456", "0.1234567890123456789")
    values: list[Any] = ["NUMBER", ["NUMBER"], {"type": "function", "name": "a", "b": "NUMBER"}]
    keys = itertools.count()

    async def scenario() -> list[str]:
        cluster, wrong = FakeCluster(tmp_path), []
        cluster.store = StoreOfTest().new_handle()

        async def status(path: str, body: str) -> int:
            headers = {**JSON, "idempotency-key": str(next(keys))}
            answer = await cluster.client.post(path, content=body.encode(), headers=headers)
            return answer.status_code

        async with cluster.serving():
            await cluster.join(0)
            for path, field in fields_of_bodies():
                for value in values:
                    body = json.dumps({**BODIES[path], field: value})
                    short, long = [
                        await status(path, body.replace('"NUMBER"', one)) for one in numbers
                    ]
                    if short != long or long >= 500:
                        wrong.append(f"{path} {body}: {short} and {long}")
        return wrong

    wrong = asyncio.run(scenario())
    assert not wrong, "\n".join(wrong)
