"""Engines of two versions with one ingress: which engine may continue which answer, and how answers
report the version."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from tests.cluster.api.test_ingress import (
    QUICK_S,
    SLOW_S,
    SlowExecutor,
    ThreadedCluster,
    body,
    threaded_cluster,
    truth,
)
from tests.cluster.text import tokenizers_for_tests

OLD, NEW = "1-old", "2-new"
Scenario = Callable[[ThreadedCluster, httpx.AsyncClient], Awaitable[None]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def run(folder: Path, scenario: Scenario) -> None:
    async def whole(house: ThreadedCluster) -> None:
        async with house.serving() as client:
            await scenario(house, client)

    with threaded_cluster(folder, 0) as house:
        house.add_engine(0, OLD)
        asyncio.run(whole(house))


async def events(client: httpx.AsyncClient, path: str, payload: dict) -> tuple[str, list[dict]]:
    """Returns the version in the header of a stream, and the chunks of the stream."""
    async with client.stream("POST", path, json={**payload, "stream": True}) as answer:
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
        return answer.headers["x-swell-version"], [json.loads(line[6:]) for line in lines]


def test_every_answer_and_every_chunk_names_its_version(folder: Path) -> None:
    async def scenario(house: ThreadedCluster, client: httpx.AsyncClient) -> None:
        payload = body([1], 5, n=2)
        whole = await client.post("/v1/completions", json=payload)
        assert whole.json()["system_fingerprint"] == whole.headers["x-swell-version"] == OLD
        options = {"stream_options": {"include_usage": True}}
        header, chunks = await events(client, "/v1/completions", {**payload, **options})
        assert header == OLD and chunks[-1]["usage"]["completion_tokens"] == 10
        assert {chunk["system_fingerprint"] for chunk in chunks} == {OLD}

    run(folder, scenario)


def test_a_response_waits_for_an_engine_of_its_version(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last old engine is lost while a new one has room. A later request goes to the new
    engine."""

    async def scenario(house: ThreadedCluster, client: httpx.AsyncClient) -> None:
        begun = asyncio.create_task(client.post("/v1/completions", json=body([1, 2], 300)))
        streamed = asyncio.create_task(events(client, "/v1/completions", body([3], 300)))
        await house.until_all_run(2)
        membership = await asyncio.to_thread(house.coordinator.membership)
        while membership.versions != [OLD]:
            await asyncio.sleep(0.05)
            membership = await asyncio.to_thread(house.coordinator.membership)
        await asyncio.to_thread(house.add_engine, 1, NEW)
        await asyncio.to_thread(house.remove_engine, 0)
        late = await client.post("/v1/completions", json=body([5], 5))
        assert late.headers["x-swell-version"] == NEW
        membership = await asyncio.to_thread(house.coordinator.membership)
        while membership.versions != [OLD]:
            await asyncio.sleep(0.05)
            membership = await asyncio.to_thread(house.coordinator.membership)
        assert not begun.done() and not streamed.done()
        monkeypatch.setattr(SlowExecutor, "step_s", QUICK_S)
        await asyncio.to_thread(house.add_engine, 2, OLD)
        whole, (version, chunks) = await asyncio.gather(begun, streamed)
        assert whole.headers["x-swell-engine"] == "0,2" and version == OLD
        assert whole.json()["choices"][0]["token_ids"] == truth([1, 2], 300, seed=3)
        ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
        assert ids == truth([3], 300, seed=3)

    monkeypatch.setattr(SlowExecutor, "step_s", SLOW_S)
    run(folder, scenario)


def test_all_choices_of_a_request_come_from_one_version(folder: Path) -> None:
    async def scenario(house: ThreadedCluster, client: httpx.AsyncClient) -> None:
        await asyncio.to_thread(house.add_engine, 1, NEW)
        while len((await client.get("/ready")).json()["engines"]) < 2:
            await asyncio.sleep(0.01)
        seen: set[str] = set()
        for index in range(60):  # usually two or three suffice
            if len(seen) == 2:
                break
            payload = {**body([index, 1], 4), "prompt": [[index, 1], [index, 2], [3, index]]}
            answer = await client.post("/v1/completions", json={**payload, "n": 4})
            ranks, version = answer.headers["x-swell-engine"], answer.headers["x-swell-version"]
            assert (ranks, version) in (("0", OLD), ("1", NEW))
            seen.add(version)
        assert seen == {OLD, NEW}

    run(folder, scenario)
