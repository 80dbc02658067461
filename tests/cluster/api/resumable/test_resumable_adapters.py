"""An answer keeps the adapter with which it began, even if the name has been given to another
one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from swell.cluster.api.responses import background
from swell.cluster.text.adapters import LoadedAdapters
from swell.configs.lora import Adapter
from tests.cluster.api.responses.responses_server import ResponsesServer, checked, wait_until
from tests.cluster.api.responses.test_responses_background import pass_lease
from tests.cluster.api.resumable.resumable_server import (
    COMPLETION,
    Client,
    ResumableServer,
    events_of,
    id_of,
)
from tests.cluster.fake_cluster import until
from tests.support.weights import adapters

pytestmark = pytest.mark.slow

SHAPES = {"model.layers.0.self_attn.q_proj": (8, 8)}
PATH, BODY = COMPLETION
ASKED = {**BODY, "model": "sql", "stream": True}


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[ResumableServer]:
    server = ResumableServer(folder, None, steps=5, **{"lora.enabled": True})
    manager, coordinator = server.cluster.manager, server.cluster.coordinator
    manager.adapters = LoadedAdapters(
        server.cluster.config.lora,
        "fake",
        lambda: coordinator.publish(adapters=manager.adapters.all),
    )
    async with server:
        yield server


async def load(server: ResumableServer, folder: Path, seed: int) -> None:
    path = str(adapters.make_adapter(folder / str(seed), SHAPES, seed=seed))
    body = {"lora_name": "sql", "lora_path": path, "load_inplace": True}
    loaded = await server.first.http.post("/v1/load_lora_adapter", json=body)
    assert loaded.status_code == 200, loaded.text


async def unload(server: ResumableServer) -> None:
    body = {"lora_name": "sql"}
    unloaded = await server.first.http.post("/v1/unload_lora_adapter", json=body)
    assert unloaded.status_code == 200, unloaded.text
    adapters = server.first.ingress.services.adapters
    await until(lambda: adapters.find("sql") is None)


async def cut(client: Client) -> str:
    """Cuts the stream after its fourth event and returns the id of that event."""
    async with client.cut_stream(PATH, ASKED, idempotency_key="k") as events:
        got = [await anext(events) for _ in range(4)]
    return id_of(got[-1])


def test_another_ingress_resumes_only_with_the_same_adapter(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            await load(server, tmp_path, 1)
            last = await cut(server.first)
            other, third = await server.another(), await server.another()
            headers = {"idempotency_key": "k", "last_event_id": last}
            server.engine.allow()
            same = await other.post(PATH, ASKED, **headers)
            assert same.status_code == 200, same.text
            first, second = server.engine.arrived
            assert first.adapter == second.adapter and first.adapter is not None
            await load(server, tmp_path, 2)
            await until(lambda: third.ingress.services.adapters.find("sql") != first.adapter)
            refused = await third.post(PATH, ASKED, **headers)
            assert refused.status_code == 409
            assert refused.json()["error"]["code"] == "adapter_gone"
            whole = await third.post(PATH, ASKED, idempotency_key="k")
            assert whole.status_code == 200
            assert server.engine.arrived[-1].adapter not in (None, first.adapter)

    asyncio.run(scenario())


def test_a_kept_answer_is_readable_after_its_adapter_was_unloaded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path) as server:
            await load(server, tmp_path, 1)
            last = await cut(server.first)
            await unload(server)
            server.engine.allow()
            rest = await server.first.post(PATH, ASKED, idempotency_key="k", last_event_id=last)
            assert rest.status_code == 200, rest.text
            assert rest.headers["idempotent-replayed"] == "true"
            assert b"[DONE]" in events_of(rest.content)[-1]
            unknown = await server.first.post(PATH, ASKED, idempotency_key="new")
            assert unknown.status_code == 404

    asyncio.run(scenario())


@pytest.mark.parametrize("later", ["unloaded", "other files"])
def test_a_background_response_is_taken_over_with_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: str
) -> None:
    monkeypatch.setattr(background, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(background, "IDLE_HEARTBEAT_S", 0.01)
    first, second = Adapter("sql", "/a", "1" * 32), Adapter("sql", "/b", "2" * 32)

    async def scenario() -> None:
        server = ResponsesServer(tmp_path, "the fox", **{"lora.enabled": True})
        async with server.open(steps=1), server.second_ingress() as (_, client, ingress):
            server.cluster.coordinator.publish(adapters=(first,))
            for one in (server.cluster.ingress, ingress):
                await until(lambda one=one: one.services.adapters.find("sql") == first)
            begun = await server.create(model="sql", background=True)
            await until(lambda: server.engine.arrived)
            now = () if later == "unloaded" else (second,)
            server.cluster.coordinator.publish(adapters=now)
            await until(lambda: ingress.services.adapters.find("sql") != first)
            server.store_handle.away = True  # the first ingress has stopped
            await pass_lease(server)
            await until(lambda: len(server.engine.arrived) == 2)
            assert [one.adapter for one in server.engine.arrived] == [first, first]
            server.engine.allow()
            done = await wait_until(
                lambda: client.responses.retrieve(begun.id),
                lambda found: found.status != "in_progress",
            )
            assert checked(done).output_text == "the fox"

    asyncio.run(scenario())
