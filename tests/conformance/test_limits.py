"""The ranges in the document are those that the routes enforce: a number at a limit is accepted,
and the next one is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from swell.cluster.api.openapi.document import openapi_document
from tests.conformance.in_process_server import MODEL, InProcessServer

pytestmark = pytest.mark.slow

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/completions": ("CompletionRequest", {"prompt": "hi", "max_tokens": 1}),
    "/v1/chat/completions": (
        "ChatCompletionRequest",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
    ),
}
TAKEN_TOGETHER = {"top_logprobs": {"logprobs": True}}
ELSEWHERE = {"data_parallel_rank", "routed_dp_rank", "session_chunk"}
"""Fields with another limit: the number of serving engines, or of chunks of a session."""


def edges() -> list[tuple[str, str, float, float]]:
    """Returns (path, field, the last accepted number, the first refused one)."""
    found = []
    schemas = openapi_document()["components"]["schemas"]
    for path, (kind, _) in BODIES.items():
        for name, field in schemas[kind]["properties"].items():
            for form in field.get("anyOf", [field]):
                step = 1 if form.get("type") == "integer" else 0.001
                if "minimum" in form:
                    found.append((path, name, form["minimum"], form["minimum"] - step))
                if "exclusiveMinimum" in form:
                    low = form["exclusiveMinimum"]
                    found.append((path, name, math.nextafter(low, 1) or step, low))
                if "maximum" in form:
                    found.append((path, name, form["maximum"], form["maximum"] + step))
    return found


@pytest.mark.parametrize(("path", "name", "taken", "refused"), edges())
def test_every_limit_is_enforced(
    in_process_server: InProcessServer, path: str, name: str, taken: float, refused: float
) -> None:
    body = {"model": MODEL, **BODIES[path][1], **TAKEN_TOGETHER.get(name, {})}
    response = in_process_server.client.post(path, json={**body, name: refused})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    if name not in ELSEWHERE:
        response = in_process_server.client.post(path, json={**body, name: taken})
        assert response.status_code == 200, response.text


def test_the_list_of_limits_is_not_empty() -> None:
    assert len({(path, name) for path, name, *_ in edges()}) >= 25
