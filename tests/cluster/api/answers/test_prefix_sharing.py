"""The cached prefixes that a request may reuse: with API keys, only those of its own key, unless
all keys share them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from swell.cluster.api.responses import background
from tests.cluster.api.responses.responses_server import ResponsesServer, wait_until
from tests.cluster.api.responses.test_responses_background import pass_lease
from tests.cluster.fake_cluster import FakeCluster, until
from tests.cluster.store_handle import StoreOfTest
from tests.cluster.text import tokenizers_for_tests
from tests.conformance.in_process_server import start_in_process_server
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

KEYS = ("alpha", "beta", "alpha")
SECRET = "the quick brown fox jumps over the lazy dog. " * 4
TURN = {"role": "user", "content": SECRET}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": SECRET, "max_tokens": 1},
    "/v1/chat/completions": {"messages": [TURN], "max_tokens": 1},
    "/v1/messages": {"messages": [TURN], "max_tokens": 1},
    "/v1/responses": {"input": SECRET, "max_output_tokens": 16},
}


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("alpha\nbeta\nk\n")
    path.chmod(0o600)
    return str(path)


def sent_by(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(("share", "found"), [("key", [False, False, True]), ("all", [0, 1, 1])])
def test_a_key_sees_only_cached_tokens_of_prefixes_that_it_may_share(
    keys: str, share: str, found: list[bool]
) -> None:
    settings = {"serve.api_keys_file": keys, "serve.share_prefixes": share}
    with start_in_process_server(**settings) as server:
        for salt in (None, "own"):
            cached = []
            for key in KEYS:
                body = {"model": "nano", "prompt": SECRET, "max_tokens": 1, "cache_salt": salt}
                url = f"{server.url}/v1/completions"
                answer = httpx.post(url, json=body, headers=sent_by(key), timeout=HANG_S)
                assert answer.status_code == 200, answer.text
                details = answer.json()["usage"]["prompt_tokens_details"] or {}
                cached.append(details.get("cached_tokens", 0) > 0)
            assert cached == list(map(bool, found)), salt


async def arrived(cluster: FakeCluster, path: str, key: str, **fields: Any) -> str | None:
    """Returns the cache salt with which a request reaches its engine."""
    body = {"model": "fake", **BODIES[path], **fields}
    headers = sent_by(key) | fields.pop("headers", {})
    answer = await cluster.client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    salt: str | None = cluster.engines[0].arrived[-1].cache_salt
    return salt


def serving(tmp_path: Path, keys: str, **settings: Any) -> FakeCluster:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return FakeCluster(tmp_path, [5] * 16, **{"serve.api_keys_file": keys, **settings})


def test_every_api_names_prefixes_by_key(tmp_path: Path, keys: str) -> None:
    """All APIs use the same salt for the same key."""

    async def run() -> None:
        found = set()
        async with serving(tmp_path, keys).serving() as cluster:
            await cluster.join(0)
            for path in BODIES:
                one, other, again = [await arrived(cluster, path, key) for key in KEYS]
                assert one == again != other and None not in (one, other), path
                salted = [await arrived(cluster, path, key, cache_salt="own") for key in KEYS]
                assert salted[0] == salted[2] and len({one, other, *salted}) == 4, path
                assert "alpha" not in f"{one}{salted}"
                found.add((one, other, *salted))
        assert len(found) == 1

    asyncio.run(run())


@pytest.mark.parametrize("key", ["serve.share_prefixes", "serve.api_keys_file"])
def test_all_keys_share_prefixes_if_configured_or_without_keys(
    tmp_path: Path, keys: str, key: str
) -> None:
    settings = {key: "all" if key.endswith("prefixes") else None}

    async def run() -> None:
        async with serving(tmp_path, keys, **settings).serving() as cluster:
            await cluster.join(0)
            for path in BODIES:
                for sender in KEYS[:2]:
                    assert await arrived(cluster, path, sender) is None
                    assert await arrived(cluster, path, sender, cache_salt="own") == "own"

    asyncio.run(run())


def test_a_recomputed_answer_keeps_the_block_names_of_its_key(tmp_path: Path, keys: str) -> None:
    """This includes an answer that a client requests twice."""

    async def run() -> None:
        async with serving(tmp_path, keys).serving() as cluster:
            await cluster.join(0)
            path = "/v1/chat/completions"
            plain = await arrived(cluster, path, "alpha")
            body = {"model": "fake", **BODIES[path]}
            headers = {**sent_by("alpha"), "idempotency-key": "1"}
            answer = await cluster.client.post(path, json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            assert cluster.engines[0].arrived[-1].cache_salt == plain

    asyncio.run(run())


def test_a_response_taken_over_keeps_the_block_names_of_its_key(
    tmp_path: Path, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(background, "IDLE_HEARTBEAT_S", 0.01)

    async def run() -> None:
        settings = {"serve.api_keys_file": keys}
        async with (
            ResponsesServer(tmp_path, "the fox", **settings).open(steps=0) as server,
            server.second_ingress() as (_, client, _),
        ):
            begun = await server.create(background=True)
            await until(lambda: len(server.engine.arrived) == 1)
            server.store_handle.away = True  # the first ingress has stopped
            await pass_lease(server)
            await until(lambda: len(server.engine.arrived) == 2)
            one, two = server.engine.arrived
            assert one.cache_salt == two.cache_salt is not None
            server.engine.allow()
            await wait_until(
                lambda: client.responses.retrieve(begun.id),
                lambda found: found.status == "completed",
            )

    asyncio.run(run())


def test_session_chunks_have_the_block_names_of_their_key(tmp_path: Path, keys: str) -> None:
    async def run() -> None:
        cluster = serving(tmp_path, keys)
        cluster.store = StoreOfTest().new_handle()
        async with cluster.serving():
            await cluster.join(0)
            salts = []
            for key in KEYS:
                made = await cluster.client.post("/v1/sessions", json={}, headers=sent_by(key))
                id = made.json()["id"]
                for _ in range(2):
                    salts.append(
                        await arrived(
                            cluster, "/v1/completions", key, session_id=id, prompt="a fox"
                        )
                    )
            assert len(set(salts)) == 2 and None not in salts
            assert salts[:2] == salts[4:] and salts[2] == salts[3]

    asyncio.run(run())
