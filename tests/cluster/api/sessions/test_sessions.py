"""Sessions over HTTP. The invariant: a chunk gets the answer of one prompt that contains everything
before it, despite any failure in between. The engine's token is a hash of the whole context."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from swell.cluster.api.sessions import session_client
from swell.cluster.api.store import session_store, store_client
from swell.cluster.api.store.session_store import CommitChunk, CreateSession, EndSession
from tests.cluster.fake_cluster import FakeCluster, body, truth, until
from tests.cluster.store_handle import StoreOfTest
from tests.cluster.text import tokenizers_for_tests
from tests.support.deadlines import HANG_S

CHUNKS = ([1, 2, 3, 4, 5], [6], [7, 8, 9, 10, 11, 12, 13], [14, 15])
COMPLETIONS = "/v1/completions"


class SessionServer:
    """One ingress, its engines, and the store."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        tokenizers_for_tests.chat_tokenizer().save_pretrained(folder)
        self.cluster = FakeCluster(folder, **settings)
        limits = {n.removeprefix("serve."): v for n, v in settings.items() if "serve." in n}
        self.store = StoreOfTest(**limits)
        self.cluster.store = self.store.new_handle()

    @contextlib.asynccontextmanager
    async def open(self, engines: int = 1) -> AsyncIterator[SessionServer]:
        async with self.cluster.serving():
            for rank in range(engines):
                await self.cluster.join(rank)
            yield self

    @property
    def client(self) -> httpx.AsyncClient:
        return self.cluster.client

    async def create(self, client: httpx.AsyncClient | None = None) -> str:
        created = await (client or self.client).post("/v1/sessions", json={})
        assert created.status_code == 200, created.text
        return str(created.json()["id"])

    async def chunk(
        self, id: str, ids: list[int], count: int = 4, stream: bool = False, **extra: Any
    ) -> list[int]:
        """Sends a chunk and returns the token ids of its answer."""
        client = extra.pop("client", None) or self.client
        asked = body(ids, count, session_id=id, stream=stream, return_token_ids=True, **extra)
        if not stream:
            answer = await client.post(COMPLETIONS, json=asked)
            assert answer.status_code == 200, answer.text
            return list(answer.json()["choices"][0]["token_ids"])
        return await stream_ids(client, asked)


async def stream_ids(client: httpx.AsyncClient, asked: dict[str, Any]) -> list[int]:
    """Returns the token ids of a stream. Checks that it finishes normally."""
    events = await stream_events(client, asked)
    assert events[-1] == "[DONE]"
    choices = [json.loads(event)["choices"] for event in events[:-1]]
    assert choices[-1][0]["finish_reason"] == "length"
    return [id for (choice,) in choices for id in choice.get("token_ids") or []]


async def stream_events(client: httpx.AsyncClient, asked: dict[str, Any]) -> list[str]:
    async with client.stream("POST", COMPLETIONS, json=asked) as answer:
        lines = [line async for line in answer.aiter_lines()]
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def run(test: Any) -> None:
    asyncio.run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chunk_continues_all_chunks_before_it(tmp_path: Path, stream: bool) -> None:
    async def test() -> None:
        async with SessionServer(tmp_path).open() as server:
            id, before = await server.create(), list[int]()
            for number, ids in enumerate(CHUNKS):
                answer = await server.chunk(id, ids, stream=stream)
                before += ids
                assert answer == truth(before, 4)
                before += answer
                found = (await server.client.get(f"/v1/sessions/{id}")).json()
                assert (found["chunks"], found["tokens"]) == (number + 1, len(before))
                core = server.cluster.engines[0].arrived[-1]
                assert core.keep_blocks
                assert core.prompt_token_ids + answer == before
                assert (core.prefix_hint is None) == (number == 0)

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_chunk_without_an_answer_is_appended(tmp_path: Path, stream: bool) -> None:
    async def test() -> None:
        async with SessionServer(tmp_path).open() as server:
            id = await server.create()
            assert await server.chunk(id, [1, 2, 3], 0, stream) == []
            assert await server.chunk(id, [4], 3, stream) == truth([1, 2, 3, 4], 3)

    run(test())


def test_a_resent_chunk_replaces_all_later_ones(tmp_path: Path) -> None:
    """A client can resend a chunk whose answer was lost."""

    async def test() -> None:
        async with SessionServer(tmp_path).open() as server:
            id = await server.create()
            first = await server.chunk(id, [1, 2])
            await server.chunk(id, [3])
            again = [1, 2, *first, 4]
            for _ in range(3):
                assert await server.chunk(id, [4], session_chunk=1) == truth(again, 4)
            assert await server.chunk(id, [9], session_chunk=0) == truth([9], 4)
            found = (await server.client.get(f"/v1/sessions/{id}")).json()
            assert (found["chunks"], found["tokens"]) == (1, 5)
            refused = await server.client.post(
                COMPLETIONS, json=body([1], 1, session_id=id, session_chunk=2)
            )
            assert refused.status_code == 409
            assert "has 1 chunks" in refused.json()["error"]["message"]

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_a_chunk_is_not_appended_if_its_client_leaves(tmp_path: Path, stream: bool) -> None:
    async def test() -> None:
        async with SessionServer(tmp_path).open(engines=0) as server:
            id, engine = await server.create(), await server.cluster.join(0, 0)
            asked = body([1, 2], 9, session_id=id, stream=stream)
            leaving = asyncio.create_task(server.client.post(COMPLETIONS, json=asked))
            await until(lambda: engine.requests)
            leaving.cancel()
            await until(lambda: engine.aborted)
            engine.allow()
            assert await server.chunk(id, [5]) == truth([5], 4)

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_the_most_recent_of_concurrent_chunks_is_committed(tmp_path: Path, stream: bool) -> None:
    async def test() -> None:
        async with SessionServer(tmp_path).open(engines=0) as server:
            id, engine = await server.create(), await server.cluster.join(0, 0)
            asked = body([1, 2], 6, session_id=id, stream=stream)
            reading = stream_events if stream else _answer
            older = asyncio.create_task(reading(server.client, asked))
            await until(lambda: len(engine.requests) == 1)
            newer = asyncio.create_task(server.chunk(id, [5], 2))
            await until(lambda: len(engine.requests) == 2)
            engine.allow()
            assert await newer == truth([5], 2)
            events = await older
            if not stream:
                assert events[0] == "409"
            error = json.loads(events[-2])["error"]
            assert error["code"] == "chunk_superseded" and events[-1] == "[DONE]"
            assert await server.chunk(id, [6]) == truth([5, *truth([5], 2), 6], 4)

    run(test())


async def _answer(client: httpx.AsyncClient, asked: dict[str, Any]) -> list[str]:
    answer = await client.post(COMPLETIONS, json=asked)
    return [str(answer.status_code), answer.text, "[DONE]"]


def test_a_chunk_survives_the_loss_of_its_engine(tmp_path: Path) -> None:
    async def test() -> None:
        async with SessionServer(tmp_path).open(engines=0) as server:
            id, engine = await server.create(), await server.cluster.join(0, 9)
            first = await server.chunk(id, [1, 2])
            running = asyncio.create_task(server.chunk(id, [3], 20))
            await until(lambda: any(len(tokens) >= 3 for *_, tokens in engine.requests.values()))
            await server.cluster.join(1)
            await server.cluster.kill(engine)
            second = await running
            assert second == truth([1, 2, *first, 3], 20)
            assert await server.chunk(id, [4]) == truth([1, 2, *first, 3, *second, 4], 4)

    run(test())


def test_another_ingress_continues_at_the_same_engine(tmp_path: Path) -> None:
    """The session names its engine, so the other ingress uses the KV cache there."""

    async def test() -> None:
        async with SessionServer(tmp_path).open(engines=4) as server:
            other = server.cluster.another_ingress(server.store.new_handle())
            async with (
                other as (_, url),
                httpx.AsyncClient(base_url=url, timeout=HANG_S) as client,
            ):
                for choice in range(6):
                    id, before, ranks = await server.create(), list[int](), set[int]()
                    for number, ids in enumerate([[100 + choice] * 5, *CHUNKS] * 2):
                        turn = client if number % 2 else server.client
                        before += ids
                        pin = {} if number else {"data_parallel_rank": choice % 4}
                        answer = await server.chunk(id, ids, client=turn, **pin)
                        assert answer == truth(before, 4)
                        before += answer
                        ranks |= {
                            engine.member.rank
                            for engine in server.cluster.engines
                            if any(core.prompt_token_ids == before[:-4] for core in engine.arrived)
                        }
                    assert len(ranks) == 1

    run(test())


@pytest.fixture
def fast_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_client, "REPORT_S", 0.05)
    monkeypatch.setattr(store_client, "_RETRY_S", 0.02)
    monkeypatch.setattr(session_store, "REPORT_S", 0.05)
    monkeypatch.setattr(session_store, "RECOVERY_S", 0.3)


@pytest.mark.usefixtures("fast_store")
def test_a_new_store_receives_the_sessions_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with SessionServer(tmp_path).open() as server:
            other = server.cluster.another_ingress(server.store.new_handle())
            async with (
                other as (_, url),
                httpx.AsyncClient(base_url=url, timeout=HANG_S) as client,
            ):
                id, before = await server.create(), list[int]()
                for number, ids in enumerate([*CHUNKS] * 2):
                    turn, another = [server.client, client][:: 1 if number % 2 else -1]
                    before += ids
                    answer = await server.chunk(id, ids, client=turn)
                    assert answer == truth(before, 4), number
                    before += answer
                    server.store.restart()
                    found = (await another.get(f"/v1/sessions/{id}")).json()
                    assert found["tokens"] == len(before), number

    run(test())


@pytest.mark.usefixtures("fast_store")
def test_a_chunk_waits_for_an_unavailable_store(tmp_path: Path) -> None:
    async def test() -> None:
        async with SessionServer(tmp_path).open(engines=0) as server:
            id, engine = await server.create(), await server.cluster.join(0, 0)
            running = asyncio.create_task(server.chunk(id, [1, 2], 3))
            await until(lambda: engine.requests)
            server.store.is_away = True
            engine.allow()
            await until(lambda: not engine.requests)
            await asyncio.sleep(0.1)
            assert not running.done(), "it is not stored"
            server.store.restart()
            server.store.is_away = False
            first = await running
            assert await server.chunk(id, [3]) == truth([1, 2, *first, 3], 4)

    run(test())


@pytest.mark.usefixtures("fast_store")
def test_without_a_store_no_chunk_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_client, "_PATIENCE_S", 0.1)

    async def test() -> None:
        async with SessionServer(tmp_path).open() as server:
            id = await server.create()
            server.store.is_away = True
            for refused in (
                await server.client.post(COMPLETIONS, json=body([1], 1, session_id=id)),
                await server.client.get(f"/v1/sessions/{id}"),
                await server.client.post("/v1/sessions", json={}),
            ):
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "store_unavailable"
                assert refused.headers["retry-after"]

    run(test())


def test_a_deleted_session_is_gone(tmp_path: Path) -> None:
    async def test() -> None:
        async with SessionServer(tmp_path).open(engines=0) as server:
            id, engine = await server.create(), await server.cluster.join(0, 0)
            running = asyncio.create_task(
                _answer(server.client, body([1, 2], 3, session_id=id, stream=False))
            )
            await until(lambda: engine.requests)
            ended = await server.client.delete(f"/v1/sessions/{id}")
            assert ended.json() == {"id": id, "object": "session.deleted", "deleted": True}
            engine.allow()
            assert (await running)[0] == "404"
            for gone in (
                await server.client.delete(f"/v1/sessions/{id}"),
                await server.client.get(f"/v1/sessions/{id}"),
                await server.client.post(COMPLETIONS, json=body([1], 1, session_id=id)),
            ):
                assert gone.status_code == 404
                assert gone.json()["error"]["code"] == "session_not_found"

    run(test())


def test_sessions_are_limited(tmp_path: Path) -> None:
    async def test() -> None:
        limits = {"serve.sessions": 2, "serve.session_bytes": 20}
        async with SessionServer(tmp_path, **limits).open() as server:
            id, _other = await server.create(), await server.create()
            refused = await server.client.post("/v1/sessions", json={})
            assert refused.status_code == 503 and "serve.sessions=2" in refused.text
            await server.chunk(id, [1, 2, 3, 4])
            refused = await server.client.post(COMPLETIONS, json=body([1], 1, session_id=id))
            assert refused.status_code == 503 and "serve.session_bytes=20" in refused.text
            await server.client.delete(f"/v1/sessions/{id}")
            await server.create()

    run(test())


def test_a_server_without_sessions_refuses_them(tmp_path: Path) -> None:
    async def test() -> None:
        async with SessionServer(tmp_path, **{"serve.sessions": 0}).open() as server:
            for refused in (
                await server.client.post("/v1/sessions", json={}),
                await server.client.post(COMPLETIONS, json=body([1], 1, session_id="sess_a")),
            ):
                assert refused.status_code == 400 and "serve.sessions=0" in refused.text

    run(test())


def test_a_chunk_that_exceeds_the_context_is_refused(tmp_path: Path) -> None:
    async def test() -> None:
        async with SessionServer(tmp_path).open() as server:
            id = await server.create()
            await server.chunk(id, [1] * 1900)
            asked = body([1] * 100, 1, session_id=id)
            error = (await server.client.post(COMPLETIONS, json=asked)).json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert "1904 of these tokens belong to the session" in error["message"]
            assert await server.chunk(id, [1], session_chunk=0) == truth([1], 4)

    run(test())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 4}, "truncate_prompt_tokens"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": None, "prompt_embeds": "x"}, "prompt_embeds"),
        ({"session_chunk": -1}, "session_chunk"),
        ({"session_id": None, "session_chunk": 0}, "session_id"),
        ({"prompt": ""}, "prompt"),
    ],
)
def test_unsupported_parameters_of_a_chunk_are_refused(
    tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    async def test() -> None:
        async with SessionServer(tmp_path).open() as server:
            asked = body([1], 1, session_id=await server.create()) | fields
            refused = await server.client.post(COMPLETIONS, json=asked)
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["param"] == param

    run(test())


def test_a_resumable_chunk_must_name_its_number(tmp_path: Path) -> None:
    async def test() -> None:
        async with SessionServer(tmp_path).open() as server:
            id, key = await server.create(), {"idempotency-key": "k"}
            asked = body([1, 2], 5, session_id=id, return_token_ids=True)
            refused = await server.client.post(COMPLETIONS, json=asked, headers=key)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "session_chunk"
            asked["session_chunk"] = 0
            first = await server.client.post(COMPLETIONS, json=asked, headers=key)
            other = server.cluster.another_ingress(server.store.new_handle())
            async with (
                other as (_, url),
                httpx.AsyncClient(base_url=url, timeout=HANG_S) as client,
            ):
                again = await client.post(COMPLETIONS, json=asked, headers=key)
            assert first.json()["choices"] == again.json()["choices"]
            assert (await server.client.get(f"/v1/sessions/{id}")).json()["tokens"] == 7

    run(test())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("fast_store")
def test_a_commit_whose_reply_was_lost_is_repeated(tmp_path: Path, stream: bool) -> None:
    async def test() -> None:
        async with SessionServer(tmp_path).open() as server:
            id = await server.create()
            server.store.loses = CommitChunk
            first = await server.chunk(id, [1, 2], stream=stream)
            assert server.store.loses is None
            assert await server.chunk(id, [3], stream=stream) == truth([1, 2, *first, 3], 4)

    run(test())


@pytest.mark.usefixtures("fast_store")
def test_a_deletion_whose_reply_was_lost_is_repeated(tmp_path: Path) -> None:
    async def test() -> None:
        limits = {"serve.sessions": 1}
        async with SessionServer(tmp_path, **limits).open() as server:
            server.store.loses = CreateSession
            id = await server.create()
            server.store.loses = EndSession
            ended = await server.client.delete(f"/v1/sessions/{id}")
            assert ended.status_code == 200, ended.text
            await server.create()

    run(test())


def test_a_refused_chunk_does_not_abort_a_running_one(tmp_path: Path) -> None:
    async def test() -> None:
        async with SessionServer(tmp_path).open(engines=0) as server:
            id, engine = await server.create(), await server.cluster.join(0, 0)
            running = asyncio.create_task(server.chunk(id, [1, 2], 5))
            await until(lambda: engine.requests)
            for fields in (
                {"temperature": -1},
                {"session_chunk": 3},
                {"max_tokens": 5000},
                {"prompt": [10**6]},
            ):
                asked = body([3], 1, session_id=id) | fields
                refused = await server.client.post(COMPLETIONS, json=asked)
                assert refused.status_code in (400, 409), refused.text
            engine.allow()
            assert await running == truth([1, 2], 5)
            found = (await server.client.get(f"/v1/sessions/{id}")).json()
            assert (found["chunks"], found["tokens"]) == (1, 7)

    run(test())


def test_a_late_retry_removes_no_later_chunk(tmp_path: Path) -> None:
    """A late retry, at another ingress, of a request that was answered long ago does not remove
    later chunks."""

    async def test() -> None:
        async with SessionServer(tmp_path).open() as server:
            id, key = await server.create(), {"idempotency-key": "k"}
            asked = body([1, 2], 5, session_id=id, session_chunk=0, return_token_ids=True)
            first = await server.client.post(COMPLETIONS, json=asked, headers=key)
            await server.chunk(id, [3])
            await server.chunk(id, [4])
            other = server.cluster.another_ingress(server.store.new_handle())
            async with (
                other as (_, url),
                httpx.AsyncClient(base_url=url, timeout=HANG_S) as client,
            ):
                again = await client.post(COMPLETIONS, json=asked, headers=key)
            assert first.json()["choices"] == again.json()["choices"]
            assert (await server.client.get(f"/v1/sessions/{id}")).json()["chunks"] == 3

    run(test())


def test_the_next_chunk_may_follow_the_finish_reason_at_once(tmp_path: Path) -> None:
    async def test() -> None:
        async with SessionServer(tmp_path).open() as server:
            id, before = await server.create(), list[int]()
            for number in range(5):
                asked = body([number + 1], 3, session_id=id, stream=True)
                async with server.client.stream("POST", COMPLETIONS, json=asked) as answer:
                    async for line in answer.aiter_lines():
                        if '"finish_reason":"length"' in line:
                            break
                before += [number + 1]
                before += truth(before, 3)
                found = (await server.client.get(f"/v1/sessions/{id}")).json()
                assert (found["chunks"], found["tokens"]) == (number + 1, len(before))

    run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_no_chunk_stays_open_after_its_answer(tmp_path: Path, stream: bool) -> None:
    """The chunk is closed if its answer finishes, fails, is refused or is abandoned by the
    client."""

    async def test() -> None:
        async with SessionServer(tmp_path).open(engines=0) as server:
            id, engine = await server.create(), await server.cluster.join(0, 0)
            copies = server.cluster.ingress._sessions._client._copies

            def is_open() -> bool:
                return any(copy.in_use for _key, copy in copies.items())

            asked = body([1], 3, session_id=id, stream=stream)
            for end in (
                lambda _: engine.fail("no"),
                lambda asking: asking.cancel(),
                lambda _: engine.allow(),
            ):
                asking = asyncio.create_task(server.client.post(COMPLETIONS, json=asked))
                await until(lambda: engine.requests and is_open())
                end(asking)
                await until(lambda: not is_open())
                await asyncio.wait([asking])
            await server.client.post(COMPLETIONS, json=asked | {"temperature": -1})
            assert not is_open()

    run(test())


def test_a_session_with_a_running_chunk_keeps_its_copy(tmp_path: Path) -> None:
    async def test() -> None:
        async with SessionServer(tmp_path).open(engines=0) as server:
            id, engine = await server.create(), await server.cluster.join(0, 0)
            other = await server.create()
            running = asyncio.create_task(server.chunk(id, [1], 3))
            await until(lambda: engine.requests)
            sessions = server.cluster.ingress._sessions._client
            kept = [sessions._key("", id), sessions._key("", other)]
            assert [key for key, _copy in sessions._copies.items()] == kept[::-1]
            sessions._copies.expire(time.monotonic() + 700.0)
            assert [key for key, _copy in sessions._copies.items()] == kept[:1]
            engine.allow()
            await running

    run(test())


@pytest.mark.parametrize("id", ["sess_", "sess_" + "0" * 33, "sess_" + "x" * 10**5, "sess_\u00e9"])
def test_an_invalid_session_id_is_a_short_404(tmp_path: Path, id: str) -> None:
    async def test() -> None:
        async with SessionServer(tmp_path).open() as server:
            refused = await server.client.post(COMPLETIONS, json=body([1], 1, session_id=id))
            assert refused.status_code == 404 and len(refused.content) < 1000

    run(test())
