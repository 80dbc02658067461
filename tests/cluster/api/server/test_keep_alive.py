"""A waiting request keeps sending bytes, and its final answer is unchanged."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.api.answers.waiting_client import REQUESTS, serving
from tests.cluster.fake_cluster import UNLIMITED_STEPS, body, until
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

QUICK = {"serve.keep_alive_s": 0.05}
SLOW = {"serve.keep_alive_s": 600.0}
COMMENT, PING = b": ping\n\n", b'event: ping\ndata: {"type":"ping"}\n\n'
FILLERS = {path: PING if path == "/v1/messages" else COMMENT for path in REQUESTS}
POOLED = "/v1/completions"


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scenario)


def tokens_of(came: bytes) -> list[str]:
    """Returns the text pieces of a streamed completion."""
    events = [line[6:] for line in came.decode().splitlines() if line.startswith("data: {")]
    return [choice["text"] for one in map(json.loads, events) for choice in one["choices"]]


@pytest.mark.parametrize("path", REQUESTS)
def test_a_stream_that_waits_for_its_first_token_sends_its_head_and_pings(
    tmp_path: Path, path: str
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, **QUICK) as world:
            engine = await world.cluster.join(0, 0)
            peer = await world.stream(path, x_request_id="mine")
            await peer.until(FILLERS[path], 2)
            engine.allow()
            answer = await peer.whole()
        assert peer.status == 200
        assert b"content-type: text/event-stream" in peer.head
        assert b"x-request-id: mine" in peer.head and b"x-swell-engine" not in peer.head
        assert b": x-swell-engine 0" in answer
        assert b'"error":{' not in answer

    run(scenario())


@pytest.mark.parametrize("path", REQUESTS)
def test_a_stream_that_waits_for_an_engine_sends_its_head_and_pings(
    tmp_path: Path, path: str
) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, **QUICK) as world:
            peer = await world.stream(path)
            await peer.until(FILLERS[path], 2)
            await world.cluster.join(0)
            answer = await peer.whole()
        assert peer.status == 200 and b": x-swell-engine 0" in answer

    run(scenario())


def test_a_response_is_created_before_its_first_token(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, **QUICK) as world:
            engine = await world.cluster.join(0, 0)
            peer = await world.stream("/v1/responses")
            await peer.until(b"event: response.in_progress")
            assert peer.came.index(b"event: response.created") < peer.came.index(b"in_progress")
            engine.allow()
            answer = await peer.whole()
        numbers = [
            json.loads(line[6:])["sequence_number"]
            for line in answer.decode().splitlines()
            if line.startswith("data: ")
        ]
        assert numbers == list(range(len(numbers)))

    run(scenario())


def test_a_stream_whose_engine_is_replaced_sends_pings_and_loses_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, **QUICK) as world:
            engine = await world.cluster.join(0, 2)
            payload = {**body([5, 6], 6), "stream": True}
            peer = await world.ask("/v1/completions", payload)
            await until(lambda: not engine.credit_steps and engine.arrived)
            await world.cluster.kill(engine)
            while len(tokens_of(peer.came)) < 1:
                await peer.more()
            seen = peer.came.count(COMMENT)
            await peer.until(COMMENT, seen + 2)
            await world.cluster.join(0)
            cut = await peer.whole()
            undisturbed = await (await world.ask("/v1/completions", payload)).whole()
        assert "".join(tokens_of(cut)) == "".join(tokens_of(undisturbed))

    run(scenario())


@pytest.mark.parametrize("path", REQUESTS)
def test_a_whole_answer_sends_nothing_before_it_is_complete(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, **QUICK) as world:
            engine = await world.cluster.join(0, 0)
            whole = await world.ask(path, REQUESTS[path])
            await until(lambda: engine.requests)
            await (await world.stream(path)).until(FILLERS[path], 3)
            assert not whole.has_bytes
            engine.allow()
            json.loads(await whole.whole())
        assert whole.status == 200 and b"x-swell-engine: 0" in whole.head

    run(scenario())


@pytest.mark.parametrize("path", REQUESTS)
def test_a_whole_answer_has_an_early_head_on_request(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, **QUICK) as world:
            engine = await world.cluster.join(0, 0)
            peer = await world.ask(path, REQUESTS[path], x_swell_early_head="1")
            await peer.until(b" ", 3)
            assert peer.came.strip() == b"" and peer.status == 200
            engine.allow()
            answer = json.loads(await peer.whole())
        assert "error" not in answer or answer["error"] is None
        assert b"content-type: application/json" in peer.head

    run(scenario())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize"])
def test_an_error_after_an_early_head_is_the_body(tmp_path: Path, path: str) -> None:
    async def scenario() -> None:
        settings = {**QUICK, "serve.no_engine_timeout_s": 0.5}
        async with serving(tmp_path, **settings) as world:
            payload = REQUESTS.get(path, {"prompt": "hi"})
            peer = await world.ask(path, payload, x_swell_early_head="1")
            answer = json.loads(await peer.whole())
        assert peer.status == 200 and peer.came.startswith(b" ")
        assert "no engine" in answer["error"]["message"]

    run(scenario())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_early_error_has_its_status(tmp_path: Path, stream: bool) -> None:
    async def scenario() -> None:
        settings = {**SLOW, "serve.no_engine_timeout_s": 0.1}
        async with serving(tmp_path, **settings) as world:
            payload = {**REQUESTS[POOLED], "stream": stream}
            peer = await world.ask(POOLED, payload, x_swell_early_head="1")
            await peer.whole()
        assert peer.status == 503

    run(scenario())


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("engine", [False, True], ids=["no engine", "failed"])
def test_an_error_after_the_head_of_a_stream_is_an_event(
    tmp_path: Path, path: str, engine: bool
) -> None:
    async def scenario() -> None:
        settings = QUICK if engine else {**QUICK, "serve.no_engine_timeout_s": 0.5}
        async with serving(tmp_path, **settings) as world:
            failing = await world.cluster.join(0, 0) if engine else None
            peer = await world.stream(path)
            await peer.until(FILLERS[path])
            if failing is not None:
                await until(lambda: failing.requests)
                failing.fail("it broke")
            answer = await peer.whole()
        assert peer.status == 200
        assert (b"it broke" if engine else b"no engine") in answer
        kind = {"/v1/messages": b"event: error\n"}.get(path)
        if path == "/v1/responses":
            kind = b"event: response.failed\n" if engine else b"event: error\n"
        assert kind is None or kind in answer
        assert answer.endswith(b"data: [DONE]\n\n") == ("completions" in path)

    run(scenario())


def test_a_disconnect_of_a_waiting_client_leaves_nothing_on_engines(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, **QUICK) as world:
            engine = await world.cluster.join(0, 0)
            peer = await world.stream("/v1/completions")
            await peer.until(COMMENT)
            await until(lambda: engine.requests)
            peer.writer.close()
            await until(lambda: engine.aborted)

    run(scenario())


def test_a_resumable_answer_has_the_same_events_after_a_wait(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, **QUICK) as world:
            engine = await world.cluster.join(0, 0)
            first = await world.stream("/v1/completions", idempotency_key="k")
            await first.until(COMMENT, 2)
            engine.allow()
            waited = await first.whole()
            again = await (await world.stream("/v1/completions", idempotency_key="k")).whole()
        events = [part for part in waited.split(b"\n\n") if not part.startswith(b":")]
        assert events == again.split(b"\n\n")

    run(scenario())


def test_an_unknown_value_of_the_header_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, **QUICK) as world:
            await world.cluster.join(0)
            peer = await world.ask(POOLED, REQUESTS[POOLED], x_swell_early_head="yes")
            answer = json.loads(await peer.whole())
        assert peer.status == 400 and answer["error"]["param"] == "x-swell-early-head"

    run(scenario())


def test_a_flowing_stream_sends_no_pings(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, **SLOW) as world:
            await world.cluster.join(0, UNLIMITED_STEPS)
            answer = await (await world.stream("/v1/completions")).whole()
        assert COMMENT not in answer and len(tokens_of(answer)) >= 1

    run(scenario())


def test_an_idle_connection_is_kept_for_the_configured_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with serving(tmp_path, **{"serve.idle_timeout_s": 0.1}) as world:
            await world.cluster.join(0)
            peer = await world.ask(POOLED, REQUESTS[POOLED])
            await peer.whole()
            async with asyncio.timeout(HANG_S):
                assert await peer._reader.read() == b""
        async with serving(tmp_path, **{"serve.idle_timeout_s": 600.0}) as world:
            await world.cluster.join(0)
            peer = await world.ask(POOLED, REQUESTS[POOLED])
            await peer.whole()
            (connection,) = world.cluster.edge._server.server_state.connections
            timer = connection.timeout_keep_alive_task
            assert timer.when() - asyncio.get_running_loop().time() > 300

    run(scenario())
