"""How a request may be written: compressed, with a byte order mark, or to a path with a trailing
slash. Each form works on all routes, so it is tested with all of them."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from swell.cluster.api.openapi.operations import OPERATIONS
from tests.cluster.fake_cluster import FakeCluster
from tests.cluster.store_handle import StoreOfTest
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

TURN = {"role": "user", "content": "hi"}
ID = "one"
"""The id of each request: a later one may cancel it."""
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "fake", "prompt": [5, 6], "max_tokens": 2},
    "/v1/chat/completions": {"model": "fake", "messages": [TURN], "max_tokens": 2},
    "/v1/responses": {"model": "fake", "input": "hi", "max_output_tokens": 16},
    "/v1/messages": {"model": "fake", "messages": [TURN], "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "fake", "messages": [TURN]},
    "/v1/sessions": {},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/cancel": {"request_id": ID},
    "/abort_requests": {"request_ids": [ID]},
    "/admin/scale": {"engines": 2},
    "/admin/drain": {"rank": 0},
    "/admin/upgrade": {"config": {"model": {"path": "m"}}},
    "/admin/update_weights": {"path": "/m"},
    "/admin/pause": {},
    "/admin/resume": {},
    "/admin/sleep": {"level": 2},
    "/admin/wake": {},
    "/admin/reset_prefix_cache": {},
}
"""Route -> a body that it accepts."""
POOLING_BODIES: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"model": "fake", "input": "hi"},
    "/classify": {"model": "fake", "input": "hi"},
    "/score": {"model": "fake", "text_1": "a", "text_2": "b"},
    "/rerank": {"model": "fake", "query": "a", "documents": ["b", "c"]},
}
POOLING_BODIES |= {
    f"/{version}{path}": payload
    for path, payload in [*POOLING_BODIES.items()][1:]
    for version in ("v1", "v2")
    if version == "v1" or path == "/rerank"
}
"""The same for the routes of pooling models (`test_pooling_http.py`)."""
ADAPTER_BODIES: dict[str, dict[str, Any]] = {
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/adapters/a"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}
"""The same for the routes that exist only with `lora.enabled` (`test_adapters_http.py`)."""
GETS = [
    one.path.replace("{model}", "fake").replace("{name}", "app.js")
    for one in OPERATIONS
    if one.method == "get" and "{id}" not in one.path and not one.path.startswith("/admin")
]
JSON = {"content-type": "application/json"}
MARK = b"\xef\xbb\xbf"


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


PACKED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("X-GZip", gzip.compress),
    "deflate": ("deflate", zlib.compress),
    "deflate without its head": ("deflate", raw_deflate),
    "identity": ("identity", bytes),
    "identity and gzip": ("identity, gzip", gzip.compress),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def answers(
    folder: Path, *requests: tuple[str, str, dict[str, str], bytes], **settings: Any
) -> list[httpx.Response]:
    settings.setdefault("serve.stored_responses", 0)

    async def scenario() -> list[httpx.Response]:
        with_store = FakeCluster(folder, **settings)
        with_store.store = StoreOfTest().new_handle()
        async with with_store.serving() as cluster:
            await cluster.join(0)
            return [
                await cluster.client.request(
                    method, path, headers=headers, content=body, follow_redirects=False
                )
                for method, path, headers, body in requests
            ]

    return asyncio.run(scenario())


def posts(change: Callable[[bytes], bytes] = bytes, **headers: str) -> list[Any]:
    """Returns a valid request to each route that takes a body. `change` is applied to the body."""
    return [
        ("POST", path, {**JSON, "x-request-id": ID, **headers}, change(json.dumps(body).encode()))
        for path, body in BODIES.items()
    ]


def test_the_list_of_routes_with_a_body_is_complete() -> None:
    paths = {one.path for one in OPERATIONS if one.body is not None}
    assert paths == BODIES.keys() | POOLING_BODIES.keys() | ADAPTER_BODIES.keys()


@pytest.mark.parametrize("name", PACKED)
def test_every_route_accepts_a_compressed_body(folder: Path, name: str) -> None:
    coding, pack = PACKED[name]
    got = answers(folder, *posts(pack, **{"content-encoding": coding}))
    assert [one.status_code // 100 for one in got] == [2] * len(BODIES), [one.text for one in got]


def test_every_route_skips_a_byte_order_mark(folder: Path) -> None:
    got = answers(folder, *posts(lambda body: MARK + body))
    assert [one.status_code // 100 for one in got] == [2] * len(BODIES), [one.text for one in got]


def test_every_route_is_served_with_a_slash_at_its_end(folder: Path) -> None:
    sent = [(method, f"{path}/", headers, body) for method, path, headers, body in posts()]
    got = answers(folder, *sent, *(("GET", f"{path}/", {}, b"") for path in GETS))
    assert [one.status_code // 100 for one in got] == [2] * len(got), [one.text for one in got]


def test_a_wrong_method_is_refused_with_a_slash_as_without(folder: Path) -> None:
    paths = ["/v1/chat/completions", "/v1/models", "/nowhere"]
    plain = answers(folder, *(("PUT", path, {}, b"") for path in paths))
    slashed = answers(folder, *(("PUT", f"{path}/", {}, b"") for path in paths))
    assert [one.status_code for one in plain] == [405, 405, 404]
    for one, other in zip(plain, slashed, strict=True):
        assert (one.status_code, one.headers.get("allow")) == (
            other.status_code,
            other.headers.get("allow"),
        )


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "gzip, gzip", "deflate, gzip", "no"])
def test_another_encoding_is_refused_by_every_route(folder: Path, coding: str) -> None:
    got = answers(folder, *posts(**{"content-encoding": coding}))
    for one in got:
        assert one.status_code == 415, one.text
        assert one.headers["accept-encoding"] == "gzip, deflate"
        assert one.json()["error"]["message"].startswith("content-encoding ")


DAMAGED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "no gzip": ("gzip", bytes),
    "no deflate": ("deflate", bytes),
    "cut": ("gzip", lambda body: gzip.compress(body)[:-9]),
    "cut in its head": ("gzip", lambda body: gzip.compress(body)[:3]),
    "one byte": ("deflate", lambda body: zlib.compress(body)[:1]),
    "cut deflate": ("deflate", lambda body: zlib.compress(body)[:-1]),
    "a wrong sum": ("gzip", lambda body: gzip.compress(body)[:-8] + bytes(8)),
    "more behind it": ("gzip", lambda body: gzip.compress(body) + b"more"),
    "empty": ("gzip", lambda _: b""),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_body_is_a_400_that_names_its_encoding(folder: Path, name: str) -> None:
    coding, damage = DAMAGED[name]
    for one in answers(folder, *posts(damage, **{"content-encoding": coding})):
        assert one.status_code == 400, one.text
        assert coding in one.json()["error"]["message"]


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress, raw_deflate])
def test_a_decompression_bomb_is_refused(folder: Path, pack: Callable[[bytes], bytes]) -> None:
    """The body decompresses from 10 KB to 10 MB. The server reads at most 100 KB."""
    bomb = pack(bytes(10_000_000))
    assert len(bomb) < 11_000
    coding = "gzip" if pack is gzip.compress else "deflate"
    sent = posts(lambda _: bomb, **{"content-encoding": coding})
    for one in answers(folder, *sent, **{"serve.max_body_bytes": 100_000}):
        assert one.status_code == 413, one.text


def test_a_body_is_accepted_up_to_the_limit_and_not_one_byte_more(folder: Path) -> None:
    def padded(size: int) -> bytes:
        body = json.dumps(BODIES["/tokenize"]).encode()
        return gzip.compress(body + b" " * (size - len(body)))

    headers = {**JSON, "content-encoding": "gzip"}
    sent = [("POST", "/tokenize", headers, padded(size)) for size in (100_000, 100_001)]
    got = answers(folder, *sent, **{"serve.max_body_bytes": 100_000})
    assert [one.status_code for one in got] == [200, 413]
