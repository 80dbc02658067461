"""Routes that monitors of other servers call, and which clients may call them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from swell.coordinator.wire import EngineReport
from tests.cluster.fake_cluster import FakeCluster, until
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_versions_and_pings_as_the_peers_give_them(folder: Path) -> None:
    async def scenario() -> None:
        async with FakeCluster(folder).serving() as cluster:
            client = cluster.client
            version = (await client.get("/version")).json()
            assert list(version) == ["version"] and version["version"]
            for method in ("GET", "POST"):
                pong = await client.request(method, "/ping")
                assert (pong.status_code, pong.json()) == (200, {"status": "ok"})
            info = (await client.get("/server_info")).json()
            assert info["version"] == version["version"]
            assert info["served_model_name"] == "fake"
            assert (info["dp_size"], info["tp_size"], info["internal_states"]) == (0, 1, [])

    asyncio.run(scenario())


def test_load_counts_running_and_waiting_requests(folder: Path) -> None:
    async def scenario() -> None:
        async with FakeCluster(folder).serving() as cluster:
            assert (await cluster.client.get("/load")).json() == {"server_load": 0}
            await cluster.join(0)
            await cluster.join(1)
            reports = [
                EngineReport(0, running=3, waiting=2, kv_usage=0.5),
                EngineReport(1, running=1),
            ]
            cluster.coordinator.tell(reports=reports)
            await until(lambda: len(cluster.ingress.llm.view.reports) == 2)
            assert (await cluster.client.get("/load")).json() == {"server_load": 6}
            info = (await cluster.client.get("/server_info")).json()
            assert info["dp_size"] == 2
            assert info["internal_states"][0] == {
                "dp_rank": 0,
                "num_running_reqs": 3,
                "num_waiting_reqs": 2,
                "kv_usage": 0.5,
            }

    asyncio.run(scenario())


def test_keys_are_required_as_by_routes_of_their_kind(folder: Path) -> None:
    """No fact of the machine is shown, not even to a client with a key."""
    keys = folder / "keys"
    keys.write_text("user-key\n")

    async def scenario() -> None:
        async with FakeCluster(folder, **{"serve.api_keys_file": str(keys)}).serving() as cluster:
            client = cluster.client
            for path in ("/health", "/ping", "/version", "/load"):
                assert (await client.get(path)).status_code == 200
            assert (await client.get("/server_info")).status_code == 401
            shown = {"authorization": "Bearer user-key"}
            answer = await client.get("/server_info", headers=shown)
            assert answer.status_code == 200
            for secret in (str(folder), "keys", "127.0.0.1", "user-key"):
                assert secret not in answer.text

    asyncio.run(scenario())


def test_a_model_card_has_what_the_peers_cards_have(folder: Path) -> None:
    async def scenario() -> list[Any]:
        async with FakeCluster(folder).serving() as cluster:
            paths = ("/v1/models", "/v1/models/", "/v1/models/fake", "/v1/models/fake/")
            got: list[httpx.Response] = [await cluster.client.get(path) for path in paths]
            assert [one.status_code for one in got] == [200] * 4
            return [one.json() for one in got]

    listed, again, card, same = asyncio.run(scenario())
    assert listed == again == {"object": "list", "data": [card]}
    assert card == same
    assert (card["id"], card["object"], card["root"], card["parent"]) == (
        "fake",
        "model",
        "fake",
        None,
    )
