"""Clients disconnect at any moment and engines come and go. At the end, nothing is leaked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from swell.cluster.client.requests.deadline import HEADER
from swell.coordinator.roster import MemberState
from tests.cluster.fake_cluster import FakeCluster, body, truth, until
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "hi"}]
CLIENTS = 60


def wish_of(draw: random.Random) -> tuple[str, dict[str, Any]]:
    chat = {"model": "fake", "messages": HELLO, "max_tokens": 8}
    many = {**body([1], 8), "prompt": [[n, 2] for n in range(draw.randint(1, 90))]}
    path, payload = draw.choice(
        [
            ("/v1/completions", body([draw.randrange(99), 2, 3], draw.randint(1, 30))),
            ("/v1/completions", {**many, "n": draw.randint(1, 2)}),
            ("/v1/completions", body([draw.randrange(99)] * 1500, 4)),
            ("/v1/completions", {**body([1, 2], 4), "user": "x" * draw.choice([9, 90_000])}),
            ("/v1/completions", {**body([1, 2], 4), "data_parallel_rank": draw.randint(0, 2)}),
            ("/v1/chat/completions", {**chat, "n": draw.randint(1, 4)}),
            ("/v1/messages", chat),
            ("/v1/responses", {"model": "fake", "input": "hi", "max_output_tokens": 6}),
        ]
    )
    return path, {**payload, "stream": draw.random() < 0.5}


async def ask(cluster: FakeCluster, draw: random.Random) -> int:
    """Sends a request, possibly with a deadline. The client may disconnect at any moment."""
    path, payload = wish_of(draw)
    headers = {HEADER: draw.choice(["0.001", "0.05", "86400"])} if draw.random() < 0.5 else {}
    await asyncio.sleep(draw.random() * 0.6)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(draw.choice([0.003, 0.02, 0.1, 0.3, 30])):
            return (await cluster.client.post(path, json=payload, headers=headers)).status_code
    return 0


async def send_a_part(cluster: FakeCluster, draw: random.Random) -> None:
    """Sends a part of a request, then disconnects."""
    path, payload = wish_of(draw)
    content = json.dumps(payload).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
    url = cluster.client.base_url
    await asyncio.sleep(draw.random() * 0.6)
    _, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(whole[: draw.randrange(len(whole) + 1)])
    await asyncio.sleep(draw.choice([0, 0.01, 0.1]))
    writer.close()


async def engines_come_and_go(cluster: FakeCluster, draw: random.Random) -> None:
    """Replaces engines at random times. Sometimes there is no engine at all."""
    engines = [await cluster.join(0, 20)]
    for rank in range(1, 5):
        await asyncio.sleep(draw.random() * 0.2)
        await cluster.mark(engines[-1].member.rank, MemberState.REPAIRING)
        await asyncio.sleep(draw.random() * 0.2)
        if draw.random() < 0.5:
            await cluster.mark(engines[-1].member.rank, MemberState.ACTIVE)
        while len(engines) > draw.randint(0, 1):
            await cluster.kill(engines.pop())
        await asyncio.sleep(draw.random() * 0.2)
        engines.append(await cluster.join(rank, 50))


def held(cluster: FakeCluster) -> dict[str, Any]:
    """Returns every resource count or container that is not zero or empty."""
    ingress, llm = cluster.ingress, cluster.ingress.llm
    router = llm._placer._router
    found = {
        "requests": llm._processor.request_states,
        "waiting for an engine": len(llm._placer._queue),
        "their tokens": llm._placer._queue.num_tokens,
        "bodies": ingress.services.reader.held_bytes,
        "readers": ingress.services.reader._readers,
        "backlog": sum(router.own_backlog(1)),
        "handlers": cluster.edge._server.server_state.tasks,
        "timers": far_timers(),
    }
    for rank, engine in router._engines.items():
        load = engine.sent
        found[f"engine {rank}"] = any(
            (load.uncomputed_tokens, load.requests, load.blocks, load.unanswered)
        )
    return {name: what for name, what in found.items() if what}


def far_timers() -> list[asyncio.TimerHandle]:
    loop: Any = asyncio.get_running_loop()
    return [t for t in loop._scheduled if not t.cancelled() and t.when() > loop.time() + 900]


@pytest.mark.parametrize("seed", range(3))
def test_no_disconnect_leaks_anything(tmp_path: Path, seed: int) -> None:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    draw = random.Random(seed)

    async def run() -> None:
        settings = {"serve.max_waiting_requests": 150, "serve.stored_responses": 0}
        async with FakeCluster(tmp_path, **settings).serving() as cluster:
            await cluster.join(9)
            await cluster.mark(9, MemberState.LEAVING)
            moves = asyncio.create_task(engines_come_and_go(cluster, draw))
            seeds = [random.Random(draw.random()) for _ in range(2 * CLIENTS)]
            asked = [asyncio.create_task(ask(cluster, one)) for one in seeds[:CLIENTS]]
            parts = [asyncio.create_task(send_a_part(cluster, one)) for one in seeds[CLIENTS:]]
            await asyncio.gather(moves, *parts)
            for engine in cluster.engines:
                engine.allow()
            codes = await asyncio.gather(*asked)
            assert set(codes) <= {0, 200, 400, 408, 429, 503}, codes
            assert 200 in codes
            with contextlib.suppress(TimeoutError):
                await until(lambda: not held(cluster))
            assert held(cluster) == {}
            answer = await cluster.client.post("/v1/completions", json=body([7], 3))
            assert answer.json()["choices"][0]["token_ids"] == truth([7], 3)

    asyncio.run(run())
