"""An ingress that drains reports so at once and lets streams finish. Streams that take too long end
with their error event."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.api.answers.waiting_client import REQUESTS, serving
from tests.cluster.fake_cluster import FakeEngine, until

pytestmark = pytest.mark.slow


def begin_drain(world: Any) -> asyncio.Task[None]:
    """Begins the drain as Serve does when it stops the replica."""
    ingress, edge = world.cluster.ingress, world.cluster.edge
    ingress.begin_drain()
    return asyncio.create_task(edge.stop(ingress.end_requests))


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("path", REQUESTS)
def test_an_answer_that_outlasts_the_drain_ends_with_its_error(
    tmp_path: Path, path: str, stream: bool
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, drain_s=0.3, **{"serve.keep_alive_s": 0.05}) as world:
            engine = await world.cluster.join(0, 1)
            peer = await world.ask(path, {**REQUESTS[path], "stream": stream})
            await until(lambda: engine.requests)
            ending = begin_drain(world)
            answer = await peer.whole()
            await ending
        assert b"cluster.drain_timeout_s" in answer
        if not stream:
            assert peer.status == 500 and json.loads(answer)["error"]
        elif path == "/v1/messages":
            assert b"event: error\n" in answer
        elif path == "/v1/responses":
            assert b"event: response.failed\n" in answer
        else:
            assert answer.endswith(b"data: [DONE]\n\n")

    asyncio.run(scenario())


def test_a_request_that_waits_for_the_first_engine_ends_with_the_drain(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"serve.keep_alive_s": 0.05}
        async with serving(tmp_path, drain_s=0.3, **settings) as world:
            streamed = await world.stream("/v1/chat/completions")
            await streamed.more()
            whole = await world.ask("/v1/chat/completions", REQUESTS["/v1/chat/completions"])
            await until(lambda: world.cluster.ingress.llm._num_early == 2)
            ending = begin_drain(world)
            answers = [await peer.whole() for peer in (streamed, whole)]
            await ending
        assert whole.status == 503 and streamed.status == 200
        assert all(b"cluster.drain_timeout_s" in answer for answer in answers)

    asyncio.run(scenario())


def test_an_answer_that_finishes_before_the_drain_timeout_is_whole(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, drain_s=600.0) as world:
            engine: FakeEngine = await world.cluster.join(0, 1)
            peer = await world.stream("/v1/completions")
            await until(lambda: engine.requests)
            ending = begin_drain(world)
            engine.allow()
            answer = await peer.whole()
            await ending
        assert b'"error"' not in answer and answer.endswith(b"data: [DONE]\n\n")

    asyncio.run(scenario())


def test_an_ingress_is_not_ready_as_soon_as_it_drains(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as world:
            await world.cluster.join(0)
            client = world.cluster.client
            assert (await client.get("/ready")).status_code == 200
            world.cluster.ingress.begin_drain()
            answer = await client.get("/ready")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "draining"
            assert (await client.get("/health")).status_code == 200

    asyncio.run(scenario())
