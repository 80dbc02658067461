"""If a user's request repeats a JSON field, the last value counts, as on other servers of OpenAI's
API. The admin API refuses repeated fields (`test_admin_bodies.py`)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.api.completions.protocol import CompletionRequest
from swell.cluster.api.openapi.operations import OPERATIONS
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.schema.decode import read
from tests.cluster.api.bodies.test_request_forms import ADAPTER_BODIES, BODIES, POOLING_BODIES

KINDS = [
    (one.path, one.body)
    for one in OPERATIONS
    if one.body is not None and not one.path.startswith("/admin")
]


def fields(*pairs: tuple[str, Any]) -> bytes:
    return (
        "{" + ",".join(f"{json.dumps(name)}:{json.dumps(v)}" for name, v in pairs) + "}"
    ).encode()


@pytest.mark.parametrize(("path", "kind"), KINDS, ids=[path for path, _ in KINDS])
def test_the_last_of_repeated_fields_counts(path: str, kind: Any) -> None:
    pairs = [*(BODIES | POOLING_BODIES | ADAPTER_BODIES)[path].items()]
    once = read(fields(*pairs), kind)[0]
    for name, value in pairs:
        other = {int: 7, str: f"{value}other", list: value * 2}[type(value)]
        again = read(fields((name, other), *pairs), kind)[0]
        assert again == once
        last = read(fields(*pairs, (name, other)), kind)[0]
        assert last == read(fields(*{**dict(pairs), name: other}.items()), kind)[0] != once


def test_the_last_of_repeated_fields_counts_among_omitted_fields() -> None:
    """A body with unknown fields in its history is read by another path, which removes them. The
    last value counts there too."""
    turn = '{"role":"user","content":"a","mine":1,"content":"b"}'
    body = f'{{"model":"m","messages":[],"messages":[{turn}],"max_tokens":1,"max_tokens":2}}'
    chat = read(body.encode(), ChatCompletionRequest)[0]
    assert [message.content for message in chat.messages] == ["b"] and chat.max_tokens == 2


def test_every_repeated_field_is_checked() -> None:
    for pairs in (
        [("max_tokens", "x"), ("max_tokens", 1)],
        [("max_tokens", 1), ("max_tokens", "x")],
    ):
        with pytest.raises(BadRequest, match="max_tokens"):
            read(fields(("model", "m"), ("prompt", "p"), *pairs), CompletionRequest)
