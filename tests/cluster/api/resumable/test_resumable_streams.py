"""A stream that is cut and resumed equals the uncut stream, even if another ingress continues
it."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.cluster.api.resumable.resumable_server import REQUESTS, ResumableServer, events_of, id_of

pytestmark = pytest.mark.slow


CUTS = 10
"""The number of cuts of each stream."""


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_continues_at_an_ingress_that_recomputes_it(tmp_path: Path, name: str) -> None:
    """Each turn splits the engine's tokens differently."""
    path, body, text = REQUESTS[name]
    draw = random.Random(name)

    async def scenario() -> None:
        async with ResumableServer(tmp_path, text) as server:
            other = await server.another()
            for turn in range(CUTS):
                server.engine.tokens_at_once = draw.randint(1, 4)
                begun = await server.first.stream(path, body, idempotency_key=f"k{turn}")
                assert len({*map(id_of, begun)}) == len(begun)
                # The cut is after an event, whose id tells the other ingress when the answer began.
                cut = draw.randint(1, len(begun)) if turn else len(begun) - 1
                last = id_of(begun[cut - 1])
                server.engine.tokens_at_once = draw.randint(1, 4)
                key = f"k{turn}"
                rest = await other.stream(path, body, idempotency_key=key, last_event_id=last)
                assert begun[:cut] + rest == begun

    asyncio.run(scenario())


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_continues_after_every_event_at_its_ingress(tmp_path: Path, name: str) -> None:
    path, body, text = REQUESTS[name]

    async def scenario() -> None:
        async with ResumableServer(tmp_path, text) as server:
            client = server.first
            whole = await client.stream(path, body, idempotency_key="k")
            arrived = len(server.engine.arrived)
            for cut, event in enumerate(whole, 1):
                last = id_of(event)
                rest = await client.stream(path, body, idempotency_key="k", last_event_id=last)
                assert whole[:cut] + rest == whole
            assert len(server.engine.arrived) == arrived

    asyncio.run(scenario())


@pytest.mark.parametrize("name", REQUESTS)
def test_a_resumable_answer_equals_the_answer_of_its_seed(tmp_path: Path, name: str) -> None:
    """The content equals that of the request without the idempotency key."""
    path, body, text = REQUESTS[name]
    body = {name: value for name, value in body.items() if name != "stream_options"}

    async def scenario() -> None:
        async with ResumableServer(tmp_path, text) as server:
            client = server.first
            plain = await client.post(path, {**body, "seed": 5})
            kept = await client.post(path, {**body, "seed": 5}, idempotency_key="k")
            assert (plain.status_code, kept.status_code) == (200, 200)
            assert _content(kept.json()) == _content(plain.json())
            again = await client.post(path, {**body, "seed": 5}, idempotency_key="k")
            assert again.content == kept.content
            assert again.headers["idempotent-replayed"] == "true"
            assert "idempotent-replayed" not in kept.headers

    asyncio.run(scenario())


def _content(answer: object) -> object:
    """Returns the answer without ids and times."""
    if isinstance(answer, list):
        return [*map(_content, answer)]
    if not isinstance(answer, dict):
        return answer
    varies = ("id", "call_id", "created", "created_at", "completed_at")
    return {name: _content(value) for name, value in answer.items() if name not in varies}


def test_events_have_ids_only_for_requests_with_a_key(tmp_path: Path) -> None:
    path, body, text = REQUESTS["completion"]

    async def scenario() -> None:
        async with ResumableServer(tmp_path, text) as server:
            answer = await server.first.post(path, {**body, "stream": True})
            assert b"id: " not in answer.content and events_of(answer.content)
            assert server.first.kept == 0

    asyncio.run(scenario())
