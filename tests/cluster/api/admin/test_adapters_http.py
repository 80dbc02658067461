"""Adapters over HTTP: `model` selects one. The engine receives its name and a salt made from it,
both move with a request, and the model routes list the adapters."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fake_cluster import FakeCluster, Stream, body, truth, until
from tests.cluster.text import tokenizers_for_tests
from tests.support.weights import adapters

pytestmark = pytest.mark.slow

SHAPES = {"model.layers.0.self_attn.q_proj": (8, 8)}
TURNS = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": TURNS, "max_tokens": 3},
}


def play(folder: Path, scene: Callable[[FakeCluster], Awaitable[None]], **settings: object) -> None:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(folder)
    folders = {
        name: str(adapters.make_adapter(folder / name, SHAPES, seed=seed))
        for seed, name in enumerate(("one", "two/of"))
    }
    on = {"lora.adapters": folders, **settings}

    async def run() -> None:
        async with FakeCluster(folder, **on).serving() as cluster:
            await scene(cluster)

    asyncio.run(run())


@pytest.mark.parametrize("route", BODIES)
def test_the_model_of_a_request_names_an_adapter(tmp_path: Path, route: str) -> None:
    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0)
        for model in ("one", "two/of", "fake", None):
            answer = await cluster.client.post(
                route, json={**BODIES[route], **({"model": model} if model else {})}
            )
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == (model or "fake")
        for stream in (True, False):
            refused = await cluster.client.post(
                route, json={**BODIES[route], "model": "none", "stream": stream}
            )
            assert refused.status_code in (400, 404)
            assert "'fake', 'one', 'two/of'" in refused.json()["error"]["message"]
        names = [one.adapter and one.adapter.name for one in engine.arrived]
        assert names == ["one", "two/of", None, None]
        salts = [one.cache_salt for one in engine.arrived]
        assert None not in salts[:2] and salts[0] != salts[1] and salts[2:] == [None, None]

    play(tmp_path, scene)


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_each_event_of_a_stream_names_the_adapter(tmp_path: Path, route: str) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        payload = {**BODIES[route], "model": "one", "stream": True}
        answer = await cluster.client.post(route, json=payload)
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        assert events and {json.loads(event)["model"] for event in events} == {"one"}

    play(tmp_path, scene)


def test_the_salt_depends_on_adapter_files_and_request(tmp_path: Path) -> None:
    salts: list[str | None] = []

    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0)
        for extra in ({}, {}, {"cache_salt": "mine"}, {"cache_salt": "other"}):
            payload = {**BODIES["/v1/completions"], "model": "one", **extra}
            await cluster.client.post("/v1/completions", json=payload)
        salts.extend(request.cache_salt for request in engine.arrived)

    play(tmp_path, scene)
    assert salts[0] == salts[1] and len(set(salts)) == 3
    first, salts = salts[0], []
    shapes = {"model.layers.0.self_attn.q_proj": (8, 9)}
    changed = adapters.make_adapter(tmp_path / "changed", shapes)
    play(tmp_path, scene, **{"lora.adapters": {"one": str(changed)}})
    assert salts[0] == salts[1] != first, "other files under the same name"


def test_a_migrated_request_keeps_its_adapter(tmp_path: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        first = await cluster.join(0, steps=3)
        stream = Stream(cluster, body([4, 5], 20, model="one"))
        await stream.has(3)
        second = await cluster.join(1)
        await cluster.kill(first)
        await stream.done
        assert stream.ids == truth([4, 5], 20)
        (moved,) = second.arrived
        assert (
            moved.adapter == first.arrived[0].adapter
            and moved.cache_salt == first.arrived[0].cache_salt
        )
        assert len(moved.output_token_ids) == 3
        await until(lambda: not cluster.ingress.llm._processor.request_states)

    play(tmp_path, scene)


def test_the_router_ignores_prefixes_that_another_adapter_computed(tmp_path: Path) -> None:
    """The ingress predicts cached prefixes by the salt. An equal prompt goes to the engine that
    computed it, unless it is for another adapter."""

    async def scene(cluster: FakeCluster) -> None:
        engines = [await cluster.join(rank) for rank in range(2)]
        prompt = list(range(3, 203))

        async def served(model: str) -> str:
            answer = await cluster.client.post("/v1/completions", json=body(prompt, 2, model=model))
            return answer.headers["x-swell-engine"]

        home = await served("one")
        assert {await served("one") for _ in range(4)} == {home}
        salts = {one.cache_salt for engine in engines for one in engine.arrived}
        await served("two/of")
        assert len(salts) == 1
        assert len({one.cache_salt for engine in engines for one in engine.arrived}) == 2

    play(tmp_path, scene)


def test_the_model_routes_list_adapters(tmp_path: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        listed = (await cluster.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card.get("parent"), card["root"]) for card in listed] == [
            ("fake", None, "fake"),
            ("one", "fake", "fake"),
            ("two/of", "fake", "fake"),
        ]
        for card in listed:
            found = await cluster.client.get(f"/v1/models/{card['id']}")
            assert found.json() == card
        missing = await cluster.client.get("/v1/models/none")
        assert missing.json()["error"]["code"] == "model_not_found"
        assert str(tmp_path) not in json.dumps(listed), "folders are not shown"

    play(tmp_path, scene)


def test_tokens_are_counted_for_an_adapter(tmp_path: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        one, base = [
            (await cluster.client.post("/tokenize", json={"prompt": "hi", "model": name})).json()
            for name in ("one", "fake")
        ]
        assert one == base and one["count"] > 0

    play(tmp_path, scene)
