"""A wrong value in any field of any body is refused under the name that the client sent, even if
the field has another name internally."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swell.cluster.api.openapi.operations import OPERATIONS
from swell.cluster.text.schema.request_body import RequestBody
from tests.cluster.api.bodies.test_request_forms import BODIES
from tests.cluster.fake_cluster import FakeCluster
from tests.cluster.store_handle import StoreOfTest
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

WRONG: list[Any] = [21, -7, 10**12, 1e300, "\ud7a3" * 2000, [], [[]], {}, {"nothing": 1}, True, "x"]
"""Each value is wrong for most fields. Where a value is valid, the request is served."""
TWO: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "stream_interval": {"stream": True},
    "session_chunk": {"session_id": "sess_none"},
    "best_of": {"n": 1},
}
"""Field -> other fields that it requires."""
NAMES = {("/v1/responses", "top_logprobs"): {"include": ["message.output_text.logprobs"]}}
RELATED: dict[str, set[str]] = {
    "max_tokens": {"min_tokens", "messages", "prompt"},
    "max_completion_tokens": {"max_tokens", "min_tokens", "messages"},
    "max_output_tokens": {"min_tokens", "input"},
    "min_tokens": {"max_tokens", "max_completion_tokens", "max_output_tokens"},
    "stream": {"stream_options", "background"},
    "n": {"best_of", "prompt"},
    "logprobs": {"top_logprobs"},
    "session_chunk": {"session_id"},
    "instructions": {"input"},
    "system": {"messages"},
    "messages": {"prompt"},
}
"""Field -> fields that a rule between the two may name instead."""


def fields_of_bodies() -> list[tuple[str, str]]:
    """Returns (path, field) of every body in `BODIES`."""
    kinds: dict[str, type[RequestBody]] = {
        one.path: one.body for one in OPERATIONS if one.body is not None
    }
    return [(path, field) for path in BODIES for field in kinds[path].__struct_fields__]


def sent_bodies() -> list[tuple[str, str, dict[str, Any]]]:
    """Returns (path, field, body with a wrong value in the field)."""
    found = []
    for path, field in fields_of_bodies():
        others = NAMES.get((path, field), TWO.get(field, {}))
        found += [(path, field, {**BODIES[path], **others, field: value}) for value in WRONG]
    return found


def test_an_error_names_the_field_that_the_client_has_sent(tmp_path: Path) -> None:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)

    async def scenario() -> list[str]:
        cluster, wrong = FakeCluster(tmp_path), []
        cluster.store = StoreOfTest().new_handle()
        async with cluster.serving():
            await cluster.join(0)
            for path, field, body in sent_bodies():
                answer = await cluster.client.post(path, json=body)
                if answer.status_code != 400:
                    continue
                error = answer.json()["error"]
                names = {field, *RELATED.get(field, ())}
                param = (error.get("param") or "").partition(".")[0].partition("[")[0]
                shown = error["message"] if path.startswith("/v1/messages") else param
                if not any(name in shown for name in names):
                    wrong.append(f"{path} {field}={body[field]!r:.40}: {param}: {error['message']}")
        return wrong

    wrong = asyncio.run(scenario())
    assert not wrong, "\n".join(wrong)
