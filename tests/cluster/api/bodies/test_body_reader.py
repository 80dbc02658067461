"""Limits of request bodies: what one body may hold, and how many bytes all bodies may hold
together."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.api.completions.protocol import CompletionRequest
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.schema import json_size as body_size
from swell.cluster.text.schema.decode import decode
from swell.cluster.text.schema.json_size import (
    MAX_ESCAPES,
    MAX_NODES,
    MAX_NUMBER_CHARS,
    MAX_SLOW_NUMBERS,
    MAX_VALUES,
    JsonCounts,
    count_json,
)
from tests.cluster.fake_cluster import FakeCluster, body, truth, until
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

TEXTS = st.text('ab"\\\\[]{},:1 \n\u00e9\u4e2d', max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=40,
)


def counted(text: bytes) -> JsonCounts:
    return [JsonCounts(), *count_json(text)][-1]


def nodes_of(value: Any) -> int:
    match value:
        case str():
            return 1
        case list():
            return 1 + sum(map(nodes_of, value))
        case dict():
            return 1 + sum(1 + nodes_of(item) for item in value.values())
    return 0


def commas_of(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return 0
    return max(0, len(value) - 1) + sum(map(commas_of, value))


@settings(max_examples=300, deadline=None)
@given(JSON, st.booleans())
def test_json_values_are_counted_without_decoding(value: Any, ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii).encode()
    parts = counted(text)
    assert parts.nodes == nodes_of(value)
    assert parts.values == 1 + commas_of(value)
    assert parts.escapes == text.count(b"\\")


@settings(max_examples=200, deadline=None)
@given(JSON, st.integers(1, 9))
def test_slices_may_end_anywhere(value: Any, slice_bytes: int) -> None:
    text = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_size, "_SLICE_BYTES", slice_bytes)
        parts = counted(text)
    assert parts.values == 1 + commas_of(value)
    # A string that crosses slices may be counted once more in each slice.
    slices = len(text) // slice_bytes + 1
    assert nodes_of(value) - slices <= parts.nodes <= nodes_of(value) + slices


def request_of(metadata: str) -> bytes:
    return f'{{"model": "m", "prompt": "x", "metadata": {metadata}}}'.encode()


TOO_MUCH = {
    "values": ("[" + "1," * MAX_VALUES + "1]", MAX_VALUES),
    "arrays": ("[" + "[]," * MAX_NODES + "[]]", MAX_NODES),
    "objects": ("[" + "{}," * MAX_NODES + "{}]", MAX_NODES),
    "texts": ("[" + '"",' * (MAX_NODES + 1) + '""]', MAX_NODES),
    "escapes": ('"' + "\\n" * (MAX_ESCAPES + 1) + '"', MAX_ESCAPES),
    "exponents": ("[" + "1e300," * (MAX_SLOW_NUMBERS + 1) + "1]", MAX_SLOW_NUMBERS),
    "digits": ("[" + "123456789012345678901," * (MAX_SLOW_NUMBERS + 1) + "1]", MAX_SLOW_NUMBERS),
    "a long number": ("[" + "1" * 10_000 + "]", MAX_NUMBER_CHARS),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_bodies_that_take_long_to_decode_are_refused_by_their_count(name: str) -> None:
    metadata, limit = TOO_MUCH[name]
    with pytest.raises(BadRequest) as refused:
        decode(request_of(metadata), CompletionRequest)
    assert refused.value.code == "request_too_large"
    assert f" {limit} " in refused.value.message


def test_ordinary_bodies_are_not_refused() -> None:
    ids = list(range(100_000, 231_072))
    decode(json.dumps({"model": "m", "prompt": [ids, ids]}).encode(), CompletionRequest)
    text = '\u4e2d\u6587, {["e1e300"]}\n' * 40_000
    read = decode(json.dumps({"model": "m", "prompt": text}).encode(), CompletionRequest)
    assert read.prompt == text


def test_all_bodies_together_are_bounded_and_free_their_room(tmp_path: Path) -> None:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)

    async def scenario() -> None:
        settings = {"serve.max_body_bytes": 10_000}
        async with FakeCluster(tmp_path, **settings).serving() as cluster:
            await cluster.join(0)
            url = cluster.client.base_url
            head = (
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: 9000\r\n\r\n"
            )
            reader = cluster.ingress.services.reader
            held = []
            for _ in range(17):
                _, writer = await asyncio.open_connection(url.host, url.port)
                writer.write(head + b" " * 8999)
                held.append(writer)
            await until(lambda: reader.held_bytes == 17 * 8999)
            late = await cluster.client.post(
                "/v1/completions", json={**body([1], 2), "user": "x" * 9000}
            )
            assert late.status_code == 503
            assert late.json()["error"]["code"] == "too_many_bodies"
            assert late.headers["retry-after"] == "1"
            less = await cluster.client.post(
                "/v1/completions", json={**body([1], 2), "user": "x" * 7500}
            )
            assert less.status_code == 200, (
                "a request below its share is not refused because of others"
            )
            for writer in held:
                writer.close()
            await until(lambda: reader.held_bytes == 0)
            answer = await cluster.client.post("/v1/completions", json=body([1], 2))
            assert answer.json()["choices"][0]["token_ids"] == truth([1], 2)

    asyncio.run(scenario())


def test_the_key_is_checked_before_the_body(tmp_path: Path) -> None:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "users").write_text("alpha\n")

    async def scenario() -> None:
        settings = {"serve.api_keys_file": str(tmp_path / "users")}
        async with FakeCluster(tmp_path, **settings).serving() as cluster:
            url = cluster.client.base_url
            stream, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Type: application/json\r\nContent-Length: 9000\r\n\r\n"
            )
            assert b"401" in await stream.readline()
            assert cluster.ingress.services.reader.held_bytes == 0
            writer.close()

    asyncio.run(scenario())
