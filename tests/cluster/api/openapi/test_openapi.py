"""The OpenAPI document describes exactly the routes that exist, and every reference in it
resolves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from jsonschema import Draft202012Validator
from starlette.routing import Route

from swell.cluster.api.admin.change_requests import DrainRequest, ScaleRequest
from swell.cluster.api.bodies.http_errors import ErrorInfo, error_body
from swell.cluster.api.chat.protocol import ChatCompletionRequest as CHAT
from swell.cluster.api.ingress import Ingress
from swell.cluster.api.openapi.document import openapi_document
from swell.cluster.api.services import Services
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.prompt.text_services import TextServices
from swell.cluster.text.schema.decode import decode
from swell.cluster.text.tokens.detokenizer import Detokenizer
from swell.configs.schema import load
from tests.cluster.text import tokenizers_for_tests

DOCUMENT = openapi_document()
OPERATIONS = [
    (method, path, operation)
    for path, item in DOCUMENT["paths"].items()
    for method, operation in item.items()
]


def served() -> set[tuple[str, str]]:
    """Returns (method, path) of each ingress route, except the last one, which catches unknown
    paths."""
    prompts = SimpleNamespace(set_limits=None)
    detokenizer = Detokenizer(tokenizers_for_tests.chat_tokenizer())
    text = TextServices(prompts, detokenizer, None, {})  # type: ignore[arg-type]
    client = SimpleNamespace(start=lambda: None)
    config = load({"model": {"path": "."}})
    ingress = Ingress(Services(config, lambda *_, **__: client, None, None, text))  # type: ignore[arg-type]
    routes = [route for route in ingress.app.routes if isinstance(route, Route)]
    return {
        (method.lower(), route.path.replace(":path}", "}"))
        for route in routes
        if route.path != "/{path:path}"
        for method in (route.methods or set()) - {"HEAD"}
    }


STREAMED = {
    ("post", "/v1/completions"),
    ("post", "/v1/chat/completions"),
    ("post", "/v1/responses"),
    ("post", "/v1/messages"),
    ("get", "/admin/events"),
}


def test_the_document_has_exactly_the_routes_of_the_ingress() -> None:
    assert {(method, path) for method, path, _ in OPERATIONS} == served()


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, dict | list):
            yield from nodes(part)


def test_no_reference_dangles_and_the_document_is_json() -> None:
    document = json.loads(json.dumps(DOCUMENT))
    references = [node["$ref"] for node in nodes(document) if "$ref" in node]
    assert references
    for reference in references:
        place = document
        for part in reference.removeprefix("#/").split("/"):
            place = place[part]


def test_every_schema_is_valid() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


@pytest.mark.parametrize(("method", "path", "operation"), OPERATIONS)
def test_answers_match_their_errors(method: str, path: str, operation: dict[str, Any]) -> None:
    responses = operation["responses"]
    if "requestBody" in operation:
        assert {"400", "401", "413", "415"} <= responses.keys()
    assert ("security" in operation) == ("401" in responses)
    for status, answer in responses.items():
        assert answer["content"]
        if int(status) >= 400:
            kind = "MessagesError" if path.startswith("/v1/messages") else "ErrorBody"
            reference = {"$ref": f"#/components/schemas/{kind}"}
            assert answer["content"]["application/json"]["schema"] == reference
    streamed = any("text/event-stream" in r["content"] for r in responses.values())
    assert streamed == ((method, path) in STREAMED)


def test_operation_ids_are_unique() -> None:
    ids = [operation["operationId"] for _, _, operation in OPERATIONS]
    assert len(set(ids)) == len(ids)


def validator(name: str) -> Draft202012Validator:
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    return Draft202012Validator(schema)


def test_schemas_describe_what_the_types_accept() -> None:
    requests = validator("ChatCompletionRequest")
    messages = [{"role": "user", "content": "hi"}]
    assert requests.is_valid({"model": "m", "messages": messages, "top_k": 3})
    assert not requests.is_valid({"model": "m", "messages": messages, "top_kk": 3})
    assert not requests.is_valid({"model": "m"})
    assert validator("ErrorBody").is_valid(
        msgspec.to_builtins(error_body(ErrorInfo(400, "no", param="x")))
    )


def test_histories_are_open_and_fields_of_other_servers_are_listed() -> None:
    requests = validator("ChatCompletionRequest")
    message = {"role": "user", "content": "hi"}
    assert requests.is_valid({"messages": [{**message, "parsed": {}, "mine": 1}]})
    for name, taken, refused in (
        ("length_penalty", 1.0, 2.0),
        ("use_beam_search", False, True),
        ("logits_processors", [], ["x"]),
        ("max_new_tokens", 3, "three"),
    ):
        for value in (taken, None):
            assert requests.is_valid({"messages": [message], name: value})
            decode(json.dumps({"messages": [message], name: value}).encode(), CHAT)
        assert not requests.is_valid({"messages": [message], name: refused})
        with pytest.raises(BadRequest):
            decode(json.dumps({"messages": [message], name: refused}).encode(), CHAT)
    assert requests.is_valid({"messages": [message], "request_id": ["any", "thing"]})


def test_a_server_that_ignores_unknown_fields_documents_it() -> None:
    schemas = openapi_document("ignore")["components"]["schemas"]
    for name in ("ChatCompletionRequest", "StreamOptions", "MessagesRequest"):
        assert schemas[name]["additionalProperties"] is True
        assert DOCUMENT["components"]["schemas"][name]["additionalProperties"] is False
    assert schemas["ScaleRequest"]["additionalProperties"] is False


def test_unsupported_fields_are_documented() -> None:
    fields = DOCUMENT["components"]["schemas"]["CompletionRequest"]["properties"]
    assert "Not served" in fields["suffix"]["description"]
    assert "description" not in fields["temperature"]


@pytest.mark.parametrize(
    ("kind", "body", "field", "value"),
    [
        (ScaleRequest, '{"engines": -1}', "engines", "-1"),
        (ScaleRequest, '{"engines": 0}', "engines", "0"),
        (ScaleRequest, '{"engines": 99999999999999}', "engines", "99999999999999"),
        (ScaleRequest, '{"engines": 2.5}', "engines", "2.5"),
        (ScaleRequest, '{"engines": 1, "drain_timeout_s": -0.5}', "drain_timeout_s", "-0.5"),
        (ScaleRequest, '{"engines": 1, "drain_timeout_s": 14401}', "drain_timeout_s", "14400"),
        (ScaleRequest, '{"engines": 1, "drain_timeout": 1}', "drain_timeout", "drain_timeout"),
        (DrainRequest, '{"rank": -1}', "rank", "-1"),
        (DrainRequest, '{"rank": null}', "rank", "None"),
        (DrainRequest, "{}", "rank", "missing"),
    ],
)
def test_admin_bodies_are_checked(kind: Any, body: str, field: str, value: str) -> None:
    with pytest.raises(BadRequest) as caught:
        decode(body.encode(), kind)
    assert caught.value.param == field
    assert value in caught.value.message


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_the_schema_of_a_drain_timeout_is_a_number(number: float) -> None:
    with pytest.raises(BadRequest, match="drain_timeout_s="):
        ScaleRequest(engines=1, drain_timeout_s=number).check()
    with pytest.raises(BadRequest):
        decode(json.dumps({"engines": 1, "drain_timeout_s": number}).encode(), ScaleRequest)
