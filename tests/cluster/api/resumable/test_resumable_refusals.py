"""Keys and ids that cannot be served are refused with the reason. A caller never reaches the answer
of another caller."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from swell.cluster.api.completions.protocol import CompletionRequest
from swell.cluster.api.resumable.resumable_request import answer_name
from swell.cluster.text.schema.decode import decode
from tests.cluster.api.resumable.resumable_server import (
    COMPLETION,
    REQUESTS,
    ResumableServer,
    events_of,
    id_of,
)
from tests.cluster.fake_cluster import until

pytestmark = pytest.mark.slow

PATH, BODY = COMPLETION
NAME = "0" * 32


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"idempotency_key": ""}, "invalid_idempotency_key"),
        ({"idempotency_key": "k" * 256}, "invalid_idempotency_key"),
        ({"idempotency_key": "a\tb"}, "invalid_idempotency_key"),
        ({"idempotency_key": "k", "last_event_id": "17"}, "invalid_event_id"),
        ({"idempotency_key": "k", "last_event_id": "chatcmpl-1.2.3.4"}, "invalid_event_id"),
        ({"idempotency_key": "k", "last_event_id": f"{NAME}.1..{'9' * 10}"}, "invalid_event_id"),
        ({"last_event_id": f"{NAME}.1..4"}, "missing_idempotency_key"),
    ],
)
def test_invalid_headers_are_refused(tmp_path: Path, headers: dict[str, str], code: str) -> None:
    async def scenario() -> None:
        async with ResumableServer(tmp_path) as server:
            refused = await server.first.post(PATH, {**BODY, "stream": True}, **headers)
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["code"] == code
            assert not server.engine.arrived and server.first.kept == 0

    asyncio.run(scenario())


def test_the_name_of_an_answer_depends_on_the_whole_request() -> None:
    body = CompletionRequest(prompt="a")
    asked = [
        ("", "/v1/a", "k", body),
        ("o", "/v1/a", "k", body),
        ("", "/v1/b", "k", body),
        ("", "/v1/a", "l", body),
        ("", "/v1/a", "k", CompletionRequest(prompt="b")),
        ("", "/v1/ak", "", body),
    ]
    for digits in ("0.12345678901234567", "0.123456789012345678"):
        text = f'{{"prompt": "a", "structured_outputs": {{"json": {{"const": {digits}}}}}}}'
        asked.append(("", "/v1/a", "k", decode(text.encode(), CompletionRequest)))
    assert len({answer_name(*one) for one in asked}) == len(asked)
    assert answer_name(*asked[0]) == answer_name("", "/v1/a", "k", CompletionRequest(prompt="a"))


def test_a_key_belongs_to_one_request(tmp_path: Path) -> None:
    """An idempotency key belongs to one path and one meaning of its body."""

    async def scenario() -> None:
        async with ResumableServer(tmp_path) as server:
            client = server.first
            begun = await client.stream(PATH, BODY, idempotency_key="k")
            chat_path, chat, _ = REQUESTS["chat"]
            for path, body in (
                (PATH, {**BODY, "max_tokens": 8, "stream": True}),
                (PATH, BODY),
                (chat_path, {**chat, "stream": True}),
            ):
                refused = await client.post(path, body, idempotency_key="k")
                assert refused.status_code == 422, refused.text
                assert refused.json()["error"]["code"] == "idempotency_key_reused"
            same = dict(reversed({**BODY, "stream": True}.items()))
            assert (await client.post(PATH, same, idempotency_key="k")).status_code == 200
            other = await server.another()
            last = id_of(begun[2])
            for body, key in (({**BODY, "max_tokens": 8}, "k"), (BODY, "another")):
                sent = {**body, "stream": True}
                refused = await other.post(PATH, sent, idempotency_key=key, last_event_id=last)
                assert refused.status_code == 422, refused.text
                assert refused.json()["error"]["code"] == "event_of_another_answer"
            assert other.kept == 0

    asyncio.run(scenario())


def test_an_unknown_event_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResumableServer(tmp_path) as server:
            begun = await server.first.stream(PATH, BODY, idempotency_key="k")
            prefix, _, number = id_of(begun[-1]).rpartition(".")
            beyond = f"{prefix}.{int(number) + 1}"
            for client in (server.first, await server.another()):
                sent = {"idempotency_key": "k", "last_event_id": beyond}
                refused = await client.post(PATH, {**BODY, "stream": True}, **sent)
                assert refused.status_code == 400
                message = refused.json()["error"]["message"]
                assert (
                    str(int(number) + 1) in message and f"events in the answer, {number}" in message
                )
            last = {"idempotency_key": "k", "last_event_id": id_of(begun[-1])}
            assert await server.first.stream(PATH, BODY, **last) == []

    asyncio.run(scenario())


def test_an_answer_that_is_not_streamed_has_no_events(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResumableServer(tmp_path) as server:
            sent = {"idempotency_key": "k", "last_event_id": f"{NAME}.1..4"}
            refused = await server.first.post(PATH, BODY, **sent)
            assert refused.status_code == 400 and "stream=true" in refused.text

    asyncio.run(scenario())


def test_a_key_belongs_to_its_caller(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice\nbob\n")
    settings = {"serve.api_keys_file": str(keys)}

    async def scenario() -> None:
        async with ResumableServer(tmp_path, **settings) as server:
            client = server.first
            alice: dict[str, Any] = {"idempotency_key": "k", "authorization": "Bearer alice"}
            bob = {**alice, "authorization": "Bearer bob"}
            of_alice = await client.stream(PATH, BODY, **alice)
            of_bob = await client.stream(PATH, BODY, **bob)
            assert len(server.engine.arrived) == 2
            seeds = {request.sampler.seed for request in server.engine.arrived}
            assert len(seeds) == 2
            assert id_of(of_alice[0]) != id_of(of_bob[0])
            last = {"last_event_id": id_of(of_alice[0])}
            refused = await client.post(PATH, {**BODY, "stream": True}, **bob, **last)
            assert refused.status_code == 422
            other_body = {**BODY, "max_tokens": 3, "stream": True}
            assert (await client.post(PATH, other_body, **alice)).status_code == 422
            assert (await client.post(PATH, BODY, idempotency_key="k")).status_code == 401

    asyncio.run(scenario())


def test_answers_beyond_the_limit_are_refused_while_all_run(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice\nbob\n")
    settings: dict[str, Any] = {
        "serve.api_keys_file": str(keys),
        "serve.resumable_answers": 3,
        "serve.resumable_answers_per_key": 2,
    }

    async def scenario() -> None:
        async with ResumableServer(tmp_path, steps=0, **settings) as server:
            client = server.first

            def post(key: str, caller: str) -> Any:
                sent = {"idempotency_key": key, "authorization": f"Bearer {caller}"}
                return client.post(PATH, BODY, **sent)

            waiting = [asyncio.create_task(post(key, "alice")) for key in "ab"]
            await until(lambda: client.kept == 2)
            refused = await post("c", "alice")
            assert refused.status_code == 429, refused.text
            assert "resumable_answers_per_key=2" in refused.text
            waiting.append(asyncio.create_task(post("c", "bob")))
            await until(lambda: client.kept == 3)
            refused = await post("d", "bob")
            assert refused.status_code == 503, refused.text
            assert "resumable_answers=3" in refused.text and "retry-after" in refused.headers
            server.engine.allow()
            assert {(await one).status_code for one in waiting} == {200}
            for key in "def":
                assert (await post(key, "bob")).status_code == 200
            assert client.kept == 3

    asyncio.run(scenario())


def test_a_server_that_keeps_no_answers_refuses_the_header(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResumableServer(tmp_path, **{"serve.resumable_answers": 0}) as server:
            refused = await server.first.post(PATH, BODY, idempotency_key="k")
            assert refused.status_code == 400 and "resumable_answers=0" in refused.text

    asyncio.run(scenario())


def test_an_expired_answer_is_computed_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with ResumableServer(tmp_path, **{"serve.resumable_age_s": 0.01}) as server:
            client = server.first
            begun = await client.stream(PATH, BODY, idempotency_key="k")
            await until(lambda: client.kept == 0)
            last = id_of(begun[2])
            rest = await client.stream(PATH, BODY, idempotency_key="k", last_event_id=last)
            assert begun[:3] + rest == begun
            assert len(server.engine.arrived) == 2
            await until(lambda: client.kept_bytes == 0)

    asyncio.run(scenario())


def test_an_evicted_answer_is_computed_again(tmp_path: Path) -> None:
    """The client is at most five events late: two steps, and the three events of the end. Of 6 000
    bytes, half are some 15 events, so those that the client waits for are kept."""
    limit = 6000
    settings = {"serve.resumable_bytes": limit}
    body = {**BODY, "max_tokens": 60}

    async def scenario() -> None:
        async with ResumableServer(tmp_path, steps=0, **settings) as server:

            async def read(**headers: str) -> list[bytes]:
                """Reads a stream as fast as it comes: the engine gets one step of credit for each
                event. It starts with two, because the client may have the first event already."""
                engine = server.engine
                engine.call(lambda: setattr(engine, "credit_steps", 0))
                engine.allow(2)
                events = []
                async with server.first.cut_stream(PATH, body, **headers) as stream:
                    async for event in stream:
                        events.append(event)
                        if engine.requests:
                            engine.allow(1)
                return events_of(b"\n\n".join(events))

            begun = await read(idempotency_key="k")
            assert sum(map(len, begun)) > limit >= server.first.kept_bytes
            rest = await read(idempotency_key="k", last_event_id=id_of(begun[0]))
            assert begun[:1] + rest == begun and len(server.engine.arrived) == 2
            whole = await read(idempotency_key="k")
            assert len(whole) == len(begun) and len(server.engine.arrived) == 3
            assert server.first.kept_bytes <= limit

    asyncio.run(scenario())
