"""The lifetime of a resumable answer: its readers, its grace time, and its removal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swell.cluster.client.metrics import RESUMABLE_RESULTS
from swell.coordinator import roster as rosters
from swell.coordinator.roster import MemberState
from tests.cluster.api.resumable.resumable_server import (
    COMPLETION,
    REQUESTS,
    Client,
    ResumableServer,
    events_of,
    id_of,
)
from tests.cluster.client.failover.test_no_leaks import held
from tests.cluster.fake_cluster import until

pytestmark = pytest.mark.slow

PATH, BODY = COMPLETION
TOKENS = 9
LONG_S, SHORT_S = 600.0, 0.05


async def take(events: AsyncIterator[bytes], count: int) -> list[bytes]:
    return [await anext(events) for _ in range(count)]


async def cut(client: Client, count: int, **headers: str) -> list[bytes]:
    """Cuts a stream after `count` events and returns them."""
    async with client.cut_stream(PATH, BODY, **headers) as events:
        return await take(events, count)


def test_a_disconnect_aborts_a_request_without_a_key(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResumableServer(tmp_path, steps=2) as server:
            await cut(server.first, 1)
            await until(lambda: server.engine.aborted)
            await server.is_idle()
            await until(lambda: not held(server.cluster))

    asyncio.run(scenario())


def test_an_answer_continues_without_a_reader_until_its_client_reconnects(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"serve.resume_grace_s": LONG_S}
        async with ResumableServer(tmp_path, steps=2, **settings) as server:
            begun = await cut(server.first, 2, idempotency_key="k")
            server.engine.allow()
            await server.is_idle()
            last = id_of(begun[-1])
            rest = await server.first.stream(PATH, BODY, idempotency_key="k", last_event_id=last)
            assert len(begun + rest) == TOKENS + 1 and rest[-1].endswith(b"[DONE]")
            assert not server.engine.aborted and len(server.engine.arrived) == 1
            whole = await server.first.stream(PATH, BODY, idempotency_key="k")
            assert begun + rest == whole

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_without_a_reader_is_aborted_after_the_grace_time(
    tmp_path: Path, stream: bool
) -> None:
    async def scenario() -> None:
        settings = {"serve.resume_grace_s": SHORT_S}
        async with ResumableServer(tmp_path, steps=2, **settings) as server:
            if stream:
                await cut(server.first, 2, idempotency_key="k")
            else:
                asked = asyncio.create_task(server.first.post(PATH, BODY, idempotency_key="k"))
                await until(lambda: server.engine.arrived)
                asked.cancel()
            await until(lambda: server.engine.aborted)
            await server.is_idle()
            await until(lambda: not held(server.cluster))
            assert server.first.kept == 0
            server.engine.allow()
            again = await server.first.stream(PATH, BODY, idempotency_key="k")
            assert len(again) == TOKENS + 1

    asyncio.run(scenario())


def test_a_client_that_reconnects_at_the_end_of_the_grace_time_gets_a_whole_answer(
    tmp_path: Path,
) -> None:
    """The client's request is read while the answer is being aborted."""

    async def scenario() -> None:
        settings = {"serve.resume_grace_s": LONG_S}
        async with ResumableServer(tmp_path, steps=2, **settings) as server:
            await cut(server.first, 2, idempotency_key="k")
            await until(lambda: server.first.grace_timers)
            ((generation, timer),) = server.first.grace_timers.items()
            resumable = server.first.ingress.services.resumable
            timer._run()
            assert not resumable._table.holds(generation) and generation in resumable._tasks
            timer.cancel()
            server.engine.allow()
            again = await server.first.stream(PATH, BODY, idempotency_key="k")
            assert len(again) == TOKENS + 1

    asyncio.run(scenario())


def test_a_reconnected_client_stops_the_grace_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"serve.resume_grace_s": LONG_S}
        async with ResumableServer(tmp_path, steps=2, **settings) as server:
            client = server.first
            begun = await cut(client, 2, idempotency_key="k")
            await until(lambda: len(client.grace_timers) == 1)
            (timer,) = client.grace_timers.values()
            async with client.cut_stream(PATH, BODY, idempotency_key="k") as events:
                assert await take(events, 2) == begun
                assert not client.grace_timers and timer.cancelled()
            await until(lambda: len(client.grace_timers) == 1)
            server.engine.allow()
            await until(lambda: not client.grace_timers)

    asyncio.run(scenario())


def test_several_readers_follow_one_answer(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResumableServer(tmp_path, steps=3) as server:
            client = server.first
            async with client.cut_stream(PATH, BODY, idempotency_key="k") as first:
                begun = await take(first, 3)
                last = id_of(begun[1])
                async with (
                    client.cut_stream(PATH, BODY, idempotency_key="k") as second,
                    client.cut_stream(PATH, BODY, idempotency_key="k", last_event_id=last) as third,
                ):
                    assert await take(second, 3) == begun
                    assert await take(third, 1) == begun[2:]
                    server.engine.allow()
                    rest = [event async for event in first]
                    assert [event async for event in second] == rest
                    assert [event async for event in third] == rest
            assert len(begun + rest) == TOKENS + 1
            assert len(server.engine.arrived) == 1

    asyncio.run(scenario())


def test_a_second_request_waits_for_the_answer_of_the_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResumableServer(tmp_path, steps=2) as server:
            posts = [
                asyncio.create_task(server.first.post(PATH, BODY, idempotency_key="k"))
                for _ in range(3)
            ]
            await until(lambda: server.engine.requests)
            server.engine.allow()
            answers = await asyncio.gather(*posts)
            assert [answer.status_code for answer in answers] == [200] * 3
            assert len({answer.content for answer in answers}) == 1
            assert len(server.engine.arrived) == 1

    asyncio.run(scenario())


def test_an_answer_of_a_lost_ingress_continues_at_another_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResumableServer(tmp_path, steps=4) as server:
            begun = await cut(server.first, 4, idempotency_key="k")
            other = await server.another()
            await server.cluster.edge.stop()
            await server.cluster.ingress.stop()
            server.engine.allow()
            last = id_of(begun[-1])
            rest = await other.stream(PATH, BODY, idempotency_key="k", last_event_id=last)
            assert await other.stream(PATH, BODY, idempotency_key="k") == begun + rest
            assert len(begun + rest) == TOKENS + 1

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["chat", "response", "message"])
def test_a_failed_stream_continues_after_its_last_event(tmp_path: Path, name: str) -> None:
    path, body, text = REQUESTS[name]

    async def scenario() -> None:
        async with ResumableServer(tmp_path, text, steps=0) as server:
            client = server.first

            async def begin() -> None:
                """Lets the engine run three steps after it has received all choices, which arrive
                one by one."""
                await until(lambda: len(server.engine.requests) == body.get("n", 1))
                server.engine.allow(3)

            beginning = asyncio.create_task(begin())
            async with client.cut_stream(path, body, idempotency_key="k") as events:
                begun = await take(events, 5)
                server.engine.fail("the test ends it")
                rest = [event async for event in events]
            await beginning
            errors = [event for event in rest if not event.startswith((b"id: ", b":"))]
            assert any(b"the test ends it" in event for event in errors)
            begun += [event for event in rest if event.startswith(b"id: ")]
            assert client.kept == 0
            server.engine.allow()
            last = id_of(begun[-1])
            rest = await client.stream(path, body, idempotency_key="k", last_event_id=last)
            other = await server.another()
            key = {"idempotency_key": "k", "last_event_id": id_of(begun[0])}
            assert events_of(b"\n\n".join(begun[1:])) + rest == await other.stream(
                path, body, **key
            )

    asyncio.run(scenario())


def test_an_answer_continues_only_in_its_version(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResumableServer(tmp_path) as server:
            await server.cluster.change(lambda now: rosters.update_members(now, [0], version="1-a"))
            begun = await server.first.stream(PATH, BODY, idempotency_key="k")
            assert ".1-a." in id_of(begun[0])
            sent: dict[str, Any] = {"idempotency_key": "k", "last_event_id": id_of(begun[3])}
            other = await server.another()
            assert begun[:4] + await other.stream(PATH, BODY, **sent) == begun
            newer = server.cluster.start(1)
            newer.member = msgspec.structs.replace(newer.member, version="2-b")
            await server.cluster.change(lambda now: rosters.join(now, [newer.member]))
            await server.cluster.mark(0, MemberState.LEAVING)
            second = await server.another()
            assert begun[:4] + await second.stream(PATH, BODY, **sent) == begun
            await server.cluster.remove(0)
            third = await server.another()
            gone = await third.post(PATH, {**BODY, "stream": True}, **sent)
            assert gone.status_code == 409 and "1-a" in gone.json()["error"]["message"]
            assert gone.json()["error"]["code"] == "version_gone"
            assert third.kept == 0 and not held(server.cluster)
            assert begun[:4] + await other.stream(PATH, BODY, **sent) == begun
            fresh = await third.stream(PATH, BODY, idempotency_key="k")
            assert ".2-b." in id_of(fresh[0])

    asyncio.run(scenario())


def counted(client: Client) -> dict[str, float]:
    counter = client.ingress.services.metrics._resumable
    return dict(zip(RESUMABLE_RESULTS, counter.numbers, strict=True))


def test_metrics_count_the_saved_tokens(tmp_path: Path) -> None:
    async def scenario() -> None:
        settings = {"serve.resume_grace_s": SHORT_S}
        async with ResumableServer(tmp_path, steps=2, **settings) as server:
            client, other = server.first, await server.another()
            async with client.cut_stream(PATH, BODY, idempotency_key="k") as events:
                begun = await take(events, 2)
                async with client.cut_stream(PATH, BODY, idempotency_key="k") as second:
                    assert await take(second, 2) == begun
            await until(lambda: counted(client)["aborted"])
            assert counted(client) == {"begun": 1, "joined": 1, "recomputed": 0, "aborted": 1}
            server.engine.allow()
            last = id_of(begun[1])
            await other.stream(PATH, BODY, idempotency_key="k", last_event_id=last)
            assert counted(other) == {"begun": 0, "joined": 0, "recomputed": 1, "aborted": 0}
            await client.post(PATH, BODY)
            assert sum(counted(client).values()) == 3, "requests without a key do not count"

    asyncio.run(scenario())
