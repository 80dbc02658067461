"""Routes that other servers' monitoring tools call, and which clients may call them."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.types import ModelInfo

from swell.cluster.api.messages.model_list import model_info, model_page
from swell.cluster.text.errors import BadRequest
from swell.coordinator.wire import EngineReport
from tests.cluster.fake_cluster import FakeCluster, until
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_versions_and_pings_have_the_form_of_the_peers(folder: Path) -> None:
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
            cluster.coordinator.publish(engines=reports)
            await until(lambda: len(cluster.ingress.llm.view.reports.engines) == 2)
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


def test_info_routes_require_the_same_keys_as_similar_routes(folder: Path) -> None:
    """The answer shows no fact of the machine, not even to a client with a key."""
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


def test_a_model_card_has_the_fields_of_the_peers_cards(folder: Path) -> None:
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


def test_models_have_the_time_at_which_they_were_written(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    os.utime(folder / "config.json", (1_700_000_000, 1_700_000_000))

    async def scenario() -> None:
        async with FakeCluster(folder).serving() as cluster:
            (card,) = (await cluster.client.get("/v1/models")).json()["data"]
            assert card["created"] == 1_700_000_000
            one = (await cluster.client.get("/v1/models/fake")).json()
            assert one["created"] == 1_700_000_000

    asyncio.run(scenario())


def test_model_cards_have_the_form_of_the_clients_sdk(folder: Path) -> None:
    """A client with Anthropic's headers gets Anthropic's form, checked with that SDK's own
    types."""
    headers = {"anthropic-version": "2023-06-01"}

    async def scenario() -> None:
        async with FakeCluster(folder).serving() as cluster:
            get = partial(cluster.client.get, headers=headers)
            page = (await get("/v1/models")).json()
            ModelInfo.model_validate(page["data"][0], strict=False)
            assert (page["first_id"], page["last_id"], page["has_more"]) == ("fake", "fake", False)
            one = (await get("/v1/models/fake")).json()
            assert (one["type"], one["id"]) == ("model", "fake")
            missing = await get("/v1/models/none")
            assert (missing.status_code, missing.json()["type"]) == (404, "error")
            refused = await get("/v1/models?limit=0")
            assert "limit='0' must be between 1 and 1000" in refused.json()["error"]["message"]

    asyncio.run(scenario())


def test_a_cursor_selects_a_page_of_models() -> None:
    models = [model_info(name, -5, 100) for name in "abcde"]
    assert models[0].created_at == "1970-01-01T00:00:00Z"

    def ids(**query: str) -> tuple[str, bool]:
        page = model_page(models, query)
        return "".join(model.id for model in page.data), page.has_more

    assert ids() == ("abcde", False)
    assert ids(limit="2") == ("ab", True)
    assert ids(limit="2", after_id="b") == ("cd", True)
    assert ids(limit="2", after_id="c") == ("de", False)
    assert ids(limit="2", before_id="d") == ("bc", True)
    assert ids(before_id="b") == ("a", False)
    for query in ({"limit": "x"}, {"after_id": "f"}, {"after_id": "a", "before_id": "b"}):
        with pytest.raises(BadRequest):
            model_page(models, query)


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/models/fake", "/v1/models/fake"),
        ("/v1/health", "/health"),
        ("/v1/nothing", None),
    ],
)
def test_a_path_with_another_prefix_is_hinted_at(
    folder: Path, sent: str, meant: str | None
) -> None:
    async def scenario() -> str:
        async with FakeCluster(folder).serving() as cluster:
            answer = await cluster.client.post(sent, json={})
            assert answer.status_code == 404
            return str(answer.json()["error"]["message"])

    message = asyncio.run(scenario())
    assert (f"did you mean '{meant}'?" in message) if meant else "did you mean" not in message
