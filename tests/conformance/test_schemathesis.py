"""Schemathesis reads /openapi.json and sends what it allows and what it forbids: no answer is a
5xx, and the document describes the status, content type and body of every answer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from tests.conformance.document import read_document
from tests.conformance.in_process_server import MODEL, InProcessServer

pytestmark = pytest.mark.slow

THOROUGH = "SWELL_CONFORMANCE" in os.environ
CASES = 40 if THOROUGH else 25
"""Random cases for each operation, half of them invalid."""
ANSWER_TOKENS = 4
BUDGETS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
SCHEMA = read_document(edges=THOROUGH)


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Sets a known model and a short answer, unless the case tests these fields."""
    query = case.query or {}
    if _is_long(query.get("seconds")):
        query["seconds"] = 0  # a stream of events lasts this long
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = MODEL
    field = BUDGETS.get(case.path)
    if field and _is_long(body.get(field, 1000)):
        body[field] = ANSWER_TOKENS
    if _is_long(body.get("max_completion_tokens")):
        body["max_completion_tokens"] = body.get("max_tokens", ANSWER_TOKENS)


def _is_long(tokens: Any) -> bool:
    return type(tokens) is int and tokens > ANSWER_TOKENS


@SCHEMA.parametrize()
@settings(
    max_examples=CASES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
def test_the_server_follows_its_openapi_document(
    case: Any, in_process_server: InProcessServer
) -> None:
    case.call_and_validate(base_url=in_process_server.url, session=in_process_server.session)


@pytest.fixture(scope="module", autouse=True)
def _serves_afterwards(in_process_server: InProcessServer) -> Iterator[None]:
    yield
    in_process_server.answers()
    in_process_server.wait_idle()
