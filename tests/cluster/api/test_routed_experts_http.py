"""`return_routed_experts` over HTTP: whole answers, streams, several choices, moves, refusals."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from swell.cluster.text.prompt.input_processor import MAX_ROUTED_TOKENS
from tests.cluster.fake_cluster import UNLIMITED_STEPS, FakeCluster, experts_of, until
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

ON = {"model.routed_experts": True}
ASKED = {"max_tokens": 5, "ignore_eos": True, "n": 2, "seed": 4, "return_routed_experts": True}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", **ASKED},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], **ASKED},
}
routes = pytest.mark.parametrize("route", BODIES)


def play(folder: Path, scene: Callable[[FakeCluster], Awaitable[None]], **settings: object) -> None:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(folder)

    async def run() -> None:
        async with FakeCluster(folder, **{**ON, **settings}).serving() as cluster:
            await scene(cluster)

    asyncio.run(run())


def check(found: dict[str, Any], prompt: list[int], answer: list[int]) -> None:
    tokens = [*prompt, *answer[:-1]]
    assert found["shape"] == [len(tokens), 2, 2]
    assert (found["layers"], found["dtype"]) == ([1, 3], "uint8")
    assert base64.b64decode(found["data"]) == b"".join(map(experts_of, tokens))


@routes
def test_a_whole_answer_has_its_routed_experts(tmp_path: Path, route: str) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        payload = {**BODIES[route], "return_token_ids": True}
        answer = (await cluster.client.post(route, json=payload)).json()
        assert len(answer["choices"]) == 2
        for choice in answer["choices"]:
            prompt = answer.get("prompt_token_ids") or choice["prompt_token_ids"]
            check(choice["routed_experts"], prompt, choice["token_ids"])
        plain = {**payload, "return_routed_experts": False}
        assert "routed_experts" not in (await cluster.client.post(route, json=plain)).text

    play(tmp_path, scene)


@routes
@pytest.mark.parametrize("move", [False, True])
def test_the_last_chunk_of_each_choice_has_its_routed_experts(
    tmp_path: Path, route: str, move: bool
) -> None:
    """The experts cover the output of all engines that computed a part of the answer."""

    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0, steps=2 if move else UNLIMITED_STEPS)
        payload = {**BODIES[route], "stream": True, "return_token_ids": True}
        asking = asyncio.create_task(cluster.client.post(route, json=payload))
        if move:
            await until(lambda: engine.arrived and engine.credit_steps == 0)
            await cluster.join(1)
            await cluster.kill(engine)
        text = (await asking).text
        prompt: list[int] = []
        answers: dict[int, list[int]] = {0: [], 1: []}
        routed: dict[int, dict[str, Any]] = {}
        for line in text.split("\n\n"):
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            prompt = prompt or event.get("prompt_token_ids") or []
            for choice in event["choices"]:
                prompt = prompt or choice.get("prompt_token_ids") or []
                answers[choice["index"]] += choice.get("token_ids") or []
                if (found := choice.get("routed_experts")) is not None:
                    assert choice["finish_reason"] == "length"
                    routed[choice["index"]] = found
        assert all(len(answer) == 5 for answer in answers.values())
        for index, answer in answers.items():
            check(routed[index], prompt, answer)

    play(tmp_path, scene)


@routes
def test_a_server_that_records_no_experts_refuses(tmp_path: Path, route: str) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        refused = await cluster.client.post(route, json=BODIES[route])
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "return_routed_experts"
        assert "model.routed_experts" in error["message"]

    play(tmp_path, scene, **{"model.routed_experts": False})


def test_too_many_tokens_are_refused(tmp_path: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        prompts, small = [[5] * 40] * 100, {"prompt": "a", "max_tokens": 2}
        payload = {"prompt": prompts, "max_tokens": 40, "return_routed_experts": True}
        refused = await cluster.client.post("/v1/completions", json={**payload, "n": 100})
        assert refused.status_code == 400
        assert f"at most {MAX_ROUTED_TOKENS}" in refused.json()["error"]["message"]
        assert (await cluster.client.post("/v1/completions", json=small)).status_code == 200

    play(tmp_path, scene, **{"serve.max_children": 10_000})
