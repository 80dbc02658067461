"""Bodies with schemas and grammars that once got a wrong answer or a 500, served over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tests.conformance.in_process_server import InProcessServer, start_in_process_server
from tests.kinds import kind

pytestmark = pytest.mark.slow

CASES = Path(__file__).parents[2] / "data/cases"


@pytest.fixture(scope="module")
def nano() -> Iterator[InProcessServer]:
    with start_in_process_server(**{"model.max_model_len": 1024}) as server:
        yield server
        server.wait_idle()


@pytest.fixture(scope="module")
def lenient() -> Iterator[InProcessServer]:
    """Starts a server that ignores schema keywords that it cannot enforce."""
    with start_in_process_server(**{"serve.schema_keywords": "ignore"}) as server:
        yield server
        server.wait_idle()


def case(name: str) -> Any:
    return json.loads((CASES / name).read_text())


def chat(server: InProcessServer, body: Any, **fields: Any) -> httpx.Response:
    return server.client.post("/v1/chat/completions", json={**body, **fields})


def exactly(text: str) -> Callable[[str], bool]:
    return lambda content: content == text


ANSWERS: dict[str, Callable[[str], bool]] = {
    "f1_exclusive_minimum": lambda text: 0 < Decimal(text) <= Decimal("0.5"),
    "f1b_exclusive_maximum_negative": lambda text: Decimal("-1.5") <= Decimal(text) < -1,
    "f2_const_2p53p1": exactly("9007199254740993"),
    "f2b_enum_snowflake": exactly("1234567890123456789"),
    "f2c_bounds_snowflake": exactly("1234567890123456789"),
    "f5b_unique_items_false": lambda text: all(isinstance(one, int) for one in json.loads(text)),
    "f5c_int64_minimum": lambda text: int(text) >= -(2**63),
    "f6_pattern_properties_dead_end": lambda text: 0 <= json.loads(text)["score"] <= 5,
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_has_the_form_of_its_schema(nano: InProcessServer, name: str) -> None:
    body = case(f"{name}.chat.json")
    for seed in range(3):
        answer = chat(nano, body, seed=seed)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        text = choice["message"]["content"]
        if choice["finish_reason"] == "stop":
            assert ANSWERS[name](text), text
            form = body["response_format"]["json_schema"]["schema"]
            jsonschema.validate(json.loads(text), form)
        else:
            assert name == "f5b_unique_items_false", "an array may be longer than the answer"


def test_a_record_of_zod_is_served(nano: InProcessServer) -> None:
    answer = chat(nano, case("f5_zod_record_tool.chat.json"))
    assert answer.status_code == 200, answer.text
    assert "x-swell-warning" not in answer.headers, "nothing was ignored"


def test_an_input_is_the_longest_object_that_was_written() -> None:
    body = case("f7_number_overflow.messages.json")
    with start_in_process_server(
        kind("llama3").folder(), **{"model.name": "llama3", "model.max_model_len": 2048}
    ) as server:
        for seed in range(6):
            answer = server.client.post("/v1/messages", json={**body, "seed": seed})
            assert answer.status_code == 200, answer.text
            for block in answer.json()["content"]:
                if block["type"] == "tool_use" and answer.json()["stop_reason"] == "tool_use":
                    assert abs(block["input"]["v"]) < 1e200, "a double holds it"


def test_a_grammar_beyond_the_limits_is_its_clients_error(nano: InProcessServer) -> None:
    before = errors(nano)
    answer = nano.client.post("/v1/completions", json=case("grammar_500.json"))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "invalid_grammar"
    assert errors(nano) == before, "the alert about failed requests stays quiet"
    nano.answers()


def errors(server: InProcessServer) -> str:
    lines = server.client.get("/metrics").text.splitlines()
    return "\n".join(line for line in lines if 'finished_reason="error"' in line)


# --------------------------------------------------------------------------- harmless keywords

HARMLESS: dict[str, Any] = {
    "names of text": {"type": "object", "propertyNames": {"type": "string"}},
    "names of a list": {
        "type": "object",
        "propertyNames": {"enum": ["a", "b"]},
        "additionalProperties": {"type": "null"},
    },
    "no unique items": {"type": "array", "items": {"type": "null"}, "uniqueItems": False},
    "not false": {"type": "null", "not": False},
    "if alone": {"type": "null", "if": {"type": "string"}},
    "then alone": {"type": "null", "then": {"type": "string"}},
    "no dependencies": {"type": "object", "dependencies": {}, "dependentRequired": {}},
    "unevaluated": {"type": "object", "unevaluatedProperties": True},
    "no others": {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "unevaluatedProperties": False,
    },
    "int64": {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    "float32": {
        "type": "number",
        "minimum": -3.4028234663852886e38,
        "maximum": 3.4028234663852886e38,
    },
    "float64": {"type": "number", "maximum": 1.7976931348623157e308},
    **{
        name: {"type": "string", "format": name, "maxLength": 5}
        for name in ("password", "byte", "binary", "path", "shoe-size")
    },
    "email of zod": {
        "type": "string",
        "format": "email",
        "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@"
        r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
    },
    "decimal of pydantic": {
        "anyOf": [
            {"type": "number"},
            {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
        ]
    },
}


def tool(schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"m": schema}, "required": ["m"]}
    return {"type": "function", "function": {"name": "rec", "parameters": parameters}}


ASK = {"messages": [{"role": "user", "content": "upper: abc"}], "max_tokens": 30, "seed": 1}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_asks_for_nothing_refuses_no_tool(nano: InProcessServer, name: str) -> None:
    for fields in (
        {"tools": [tool(HARMLESS[name])], "tool_choice": "required"},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": HARMLESS[name]},
            }
        },
    ):
        answer = chat(nano, ASK, **fields)
        assert answer.status_code == 200, answer.text
        assert "x-swell-warning" not in answer.headers


HELD = {
    "unique items": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "not": ({"type": "string", "not": {"const": "a"}}, "not"),
    "if": ({"type": "string", "if": {}, "then": {"maxLength": 3}}, "if"),
    "names by a pattern": ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    "look-ahead": ({"type": "string", "pattern": "a(?=b)"}, "pattern"),
}


@pytest.mark.parametrize("name", HELD)
def test_what_cannot_be_held_is_refused_by_tool_and_path(nano: InProcessServer, name: str) -> None:
    schema, keyword = HELD[name]
    answer = chat(nano, ASK, tools=[tool({"anyOf": [schema]})], tool_choice="required")
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "'rec'" in message and f"properties.m.anyOf[0].{keyword}=" in message
    assert "serve.schema_keywords=ignore" in message


@pytest.mark.parametrize("name", HELD)
def test_what_is_ignored_is_named_in_a_header(lenient: InProcessServer, name: str) -> None:
    schema, keyword = HELD[name]
    answer = chat(lenient, ASK, tools=[tool(schema)], tool_choice="required")
    assert answer.status_code == 200, answer.text
    warning = answer.headers["x-swell-warning"]
    assert "schema keywords were ignored" in warning
    assert f"tools[rec].properties.m.{keyword}" in warning
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with lenient.client.stream(
        "POST", "/v1/chat/completions", json={**ASK, "response_format": form, "stream": True}
    ) as streamed:
        assert keyword in streamed.headers["x-swell-warning"]
        streamed.read()


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"type": "string", "pattern": "(["}, "properties.m.pattern="),
        ({"type": "text"}, "properties.m"),
        ({"type": "integer", "minimum": "1"}, "properties.m"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "properties.m.oneOf"),
    ],
)
def test_a_wrong_schema_is_refused_by_tool_and_path(
    nano: InProcessServer, schema: Any, where: str
) -> None:
    tools = [tool({"type": "null"}), tool(schema)]
    tools[1]["function"]["name"] = "wrong"
    answer = chat(nano, ASK, tools=tools, tool_choice="required")
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "'wrong'" in message and where in message, message
