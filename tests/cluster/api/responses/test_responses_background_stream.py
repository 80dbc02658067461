"""A background response whose events the client reads while it is computed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from swell.cluster.api.responses import background
from swell.cluster.api.store.response_store import LEASE_S, Store
from tests.cluster.api.responses.responses_server import ResponsesServer, checked, wait_until
from tests.cluster.fake_cluster import until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fast_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(background, "IDLE_HEARTBEAT_S", 0.01)


def test_the_last_event_has_the_stored_response(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResponsesServer(tmp_path, "the quick brown fox").open() as server:
            stream = await server.create(background=True, stream=True)
            events = [event async for event in stream]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            kinds = [event.type for event in events]
            assert kinds[:2] == ["response.created", "response.in_progress"]
            assert kinds[-1] == "response.completed"
            told = [one.delta for one in events if one.type == "response.output_text.delta"]
            done = checked(events[-1].response)
            assert "".join(told) == done.output_text == "the quick brown fox"
            again = await server.client.responses.retrieve(done.id)
            assert again.model_dump() == done.model_dump() and again.background

    asyncio.run(scenario())


def test_a_background_stream_continues_without_its_client(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResponsesServer(tmp_path, "the quick brown fox").open(steps=1) as server:
            async with await server.create(background=True, stream=True) as events:
                async for event in events:
                    if event.type == "response.created":
                        id = event.response.id
                        break
            server.engine.allow()
            done = await wait_until(
                lambda: server.client.responses.retrieve(id),
                lambda found: found.status != "in_progress",
            )
            assert checked(done).output_text == "the quick brown fox"
            assert not server.engine.aborted and len(server.response_store.of(Store)) == 1

    asyncio.run(scenario())


def test_another_ingress_takes_over_a_background_stream(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            ResponsesServer(tmp_path, "the fox").open(steps=0) as server,
            server.second_ingress() as (_, client, _),
        ):
            stream = await server.create(background=True, stream=True)
            id = (await anext(stream)).response.id
            await until(lambda: len(server.engine.arrived) == 1)
            server.store_handle.away = True
            for _ in range(6):
                server.response_store.now_s += LEASE_S / 5
                count = server.response_store.heartbeats
                await until(lambda count=count: server.response_store.heartbeats > count + 2)
            await until(lambda: len(server.engine.arrived) == 2)
            server.engine.allow()
            done = await wait_until(
                lambda: client.responses.retrieve(id), lambda found: found.status != "in_progress"
            )
            assert checked(done).output_text == "the fox"
            await stream.close()

    asyncio.run(scenario())


def test_a_failed_background_stream_ends_with_its_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResponsesServer(tmp_path, "the fox").open(steps=0) as server:
            headers = {"x-request-timeout-s": "0.2"}
            stream = await server.create(background=True, stream=True, extra_headers=headers)
            events = [event async for event in stream]
            assert events[-1].type == "response.failed"
            failed = await server.client.responses.retrieve(events[-1].response.id)
            assert failed.status == "failed"

    asyncio.run(scenario())


def test_a_response_is_completed_if_the_reply_of_the_store_is_lost(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResponsesServer(tmp_path, "the fox").open() as server:
            server.response_store.loses = Store
            stream = await server.create(background=True, stream=True)
            last = [event async for event in stream][-1]
            assert last.type == "response.completed"
            assert len(server.response_store.of(Store)) == 2, "the request was repeated"
            found = await server.client.responses.retrieve(last.response.id)
            assert found.status == "completed" and found.output_text == "the fox"

    asyncio.run(scenario())
