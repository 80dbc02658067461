"""Bodies with schemas and grammars that once got a wrong answer or a 500, served over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import Any

import httpx
import jsonschema
import pytest
import yaml

from swell.worker.sample.grammar import GrammarMask, GrammarState
from tests.conformance.in_process_server import InProcessServer, start_in_process_server
from tests.model_kinds import model_kind
from tests.support.paths import CASES, ROOT

pytestmark = pytest.mark.slow

_ALERTS = ROOT / "configs/prometheus/alerts.yaml"
ALERTS = [
    rule for group in yaml.safe_load(_ALERTS.read_text())["groups"] for rule in group["rules"]
]


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


def test_a_cut_off_input_is_the_longest_valid_object() -> None:
    body = case("f7_number_overflow.messages.json")
    with start_in_process_server(
        model_kind("llama3").folder(), **{"model.name": "llama3", "model.max_model_len": 2048}
    ) as server:
        for seed in range(6):
            answer = server.client.post("/v1/messages", json={**body, "seed": seed})
            assert answer.status_code == 200, answer.text
            for block in answer.json()["content"]:
                if block["type"] == "tool_use" and answer.json()["stop_reason"] == "tool_use":
                    assert abs(block["input"]["v"]) < 1e200, "a double holds it"


def test_a_grammar_beyond_the_limits_is_a_client_error(nano: InProcessServer) -> None:
    before = errors(nano)
    answer = nano.client.post("/v1/completions", json=case("grammar_500.json"))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] == "invalid_grammar"
    assert errors(nano) == before, "the alert about failed requests stays quiet"
    nano.answers()


def errors(server: InProcessServer) -> str:
    lines = server.client.get("/metrics").text.splitlines()
    return "\n".join(line for line in lines if 'finished_reason="error"' in line)


# ---------------------------------------------------------------------- schemas that end midway

DEAD_END, DEAD_END_TOKENS = "dead end", 6
SCHEMA = {"const": f"{DEAD_END} {'a' * 40}"}
WHY = f"after {DEAD_END_TOKENS} tokens, none of the model's"
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.fixture
def dead_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes answers with `SCHEMA` fail after the first tokens, as a defect of the library would."""
    accept_token, compile_grammar = GrammarState.accept_token, GrammarMask._compile
    dying: list[Any] = []

    def compiled(self: GrammarMask, lark: str) -> Any:
        future = compile_grammar(self, lark)
        if DEAD_END in lark:
            dying.append(future)
        return future

    def accepted(self: GrammarState, token: int) -> None:
        accept_token(self, token)
        if self._taken == DEAD_END_TOKENS and any(self._first is one for one in dying):
            self.fail_without_token(500)

    monkeypatch.setattr(GrammarMask, "_compile", compiled)
    monkeypatch.setattr(GrammarState, "accept_token", accepted)


def dead_bodies() -> dict[str, dict[str, Any]]:
    form = {"type": "json_schema", "schema": SCHEMA}
    nested = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    asked = {"messages": ASK["messages"], "max_tokens": 60}
    return {
        "/v1/completions": {"prompt": "abc", "max_tokens": 60, "response_format": nested},
        "/v1/chat/completions": {**asked, "response_format": nested},
        "/v1/responses": {
            "input": "abc",
            "max_output_tokens": 60,
            "text": {"format": {**form, "name": "x"}},
        },
        "/v1/messages": {**asked, "output_config": {"format": form}},
    }


def ended(server: InProcessServer) -> dict[str, float]:
    """Returns how many requests ended, by reason."""
    text = server.client.get("/metrics").text
    found = re.findall(
        r'^swell_request_success_total{.*finished_reason="(\w+)".*} (.*)$', text, re.M
    )
    return {reason: float(count) for reason, count in found}


@pytest.mark.usefixtures("dead_end")
@pytest.mark.parametrize("path", PATHS)
def test_a_schema_that_fails_midway_fails_only_its_request(
    nano: InProcessServer, path: str
) -> None:
    """Requests in the same steps are not affected, and no alert is raised."""
    prompts = {"prompt": ["upper: abc", "lower: ABC"], "max_tokens": 40, "seed": 3}
    other = {**prompts, "ignore_eos": True}
    alone = nano.client.post("/v1/completions", json=other).json()["choices"]
    before = ended(nano)
    with ThreadPoolExecutor(1) as threads:
        beside = threads.submit(nano.client.post, "/v1/completions", json=other)
        answer = nano.client.post(path, json={"model": "nano", **dead_bodies()[path]})
        assert beside.result().json()["choices"] == alone
    error = answer.json()["error"]
    assert answer.status_code == 400 and WHY in error["message"], answer.text
    assert error["type"] == "invalid_request_error"
    assert path == "/v1/messages" or error["code"] == "invalid_grammar"
    after = ended(nano)
    assert after["invalid"] == before["invalid"] + 1
    alert = next(one for one in ALERTS if one.get("alert") == "SwellRequestsFail")
    (counted,) = re.findall(r'finished_reason="(\w+)"', alert["expr"])
    assert after[counted] == before[counted]


@pytest.mark.usefixtures("dead_end")
@pytest.mark.parametrize("path", PATHS)
def test_a_stream_whose_schema_fails_midway_ends_with_an_error(
    nano: InProcessServer, path: str
) -> None:
    before = ended(nano)
    body = {"model": "nano", "stream": True, **dead_bodies()[path]}
    answer = nano.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    lines = [line.partition("data: ")[2] for line in answer.text.split("\n")]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    said, last = events[:-1], events[-1]
    assert DEAD_END[:2] in json.dumps(said), "the text before it stays"
    if path == "/v1/responses":
        assert last["type"] == "response.failed"
        error = last["response"]["error"]
        assert error["code"] == "invalid_prompt", "OpenAI's code for what the client asked"
    else:
        error = last["error"]
        assert error["type"] == "invalid_request_error"
    assert WHY in error["message"]
    assert ended(nano)["invalid"] == before["invalid"] + 1
    assert ended(nano)["error"] == before["error"]


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
def test_schema_keywords_without_effect_refuse_no_tool(nano: InProcessServer, name: str) -> None:
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
    "if": ({"type": "string", "if": {"minLength": 2}, "then": {"maxLength": 3}}, "if"),
    "names by a format": ({"type": "object", "propertyNames": {"format": "uuid"}}, "propertyNames"),
    "look-ahead": ({"type": "string", "pattern": "a(?=b)"}, "pattern"),
}


@pytest.mark.parametrize("name", HELD)
def test_schemas_that_cannot_be_enforced_are_refused_with_tool_and_path(
    nano: InProcessServer, name: str
) -> None:
    schema, keyword = HELD[name]
    answer = chat(nano, ASK, tools=[tool({"anyOf": [schema]})], tool_choice="required")
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "'rec'" in message and f"properties.m.anyOf[0].{keyword}=" in message
    assert "serve.schema_keywords=ignore" in message


@pytest.mark.parametrize("name", HELD)
def test_ignored_keywords_are_named_in_a_header(lenient: InProcessServer, name: str) -> None:
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


@pytest.mark.parametrize("stream", [False, True])
def test_ignored_keywords_of_background_responses_are_named(
    lenient: InProcessServer, stream: bool
) -> None:
    """The header of the answer with the response's id names the field as the client wrote it."""
    schema, keyword = HELD["names by a format"]
    form = {"type": "json_schema", "name": "a", "schema": schema}
    body = {"model": "nano", "input": "abc", "max_output_tokens": 4, "text": {"format": form}}
    answer = lenient.client.post(
        "/v1/responses", json={**body, "background": True, "stream": stream}
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-swell-warning"].endswith(f" text.format.schema.{keyword}")
    tools = [{"type": "function", "name": "rec", "parameters": schema}]
    calling = {**body, "text": {}, "tools": tools, "tool_choice": "required"}
    called = lenient.client.post("/v1/responses", json=calling)
    assert called.headers["x-swell-warning"].endswith(f" tools[rec].{keyword}"), called.text


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


# ------------------------------------------------------------------------------------- coverage


def test_every_case_has_a_test() -> None:
    tests = [*(ROOT / "tests/cluster/api").rglob("test_*_cases.py")]
    sources = "\n".join(path.read_text() for path in tests)
    names = {path.name.partition(".")[0] for path in CASES.iterdir()}
    assert names and not [name for name in sorted(names) if f'"{name}' not in sources]
