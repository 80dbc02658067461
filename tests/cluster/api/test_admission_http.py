"""Admission control over HTTP: which requests are refused while too many wait, and the time limits
of requests."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from swell.cluster.client.requests.deadline import HEADER, MAX_TIMEOUT_S
from tests.cluster.fake_cluster import FakeCluster, Stream, body, truth, until
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

HELLO = [{"role": "user", "content": "hi"}]
REQUEST: dict[str, dict[str, Any]] = {
    "/v1/completions": body([1, 2], 2),
    "/v1/chat/completions": {"model": "fake", "messages": HELLO, "max_tokens": 2},
    "/v1/responses": {"model": "fake", "input": "hi", "max_output_tokens": 2, "store": False},
    "/v1/messages": {"model": "fake", "messages": HELLO, "max_tokens": 2},
}
NO_STEPS = 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@contextlib.asynccontextmanager
async def full(folder: Path, **settings: object) -> AsyncIterator[tuple[FakeCluster, Any, Any]]:
    """Yields a cluster at its limit of waiting requests, with one request in the only row, together
    with its engine and the tasks of the requests."""
    settings = {"scheduler.max_rows": 1, "serve.max_waiting_requests": 2, **settings}
    async with FakeCluster(folder, **settings).serving() as cluster:
        engine = await cluster.join(0, NO_STEPS)
        first = [
            asyncio.create_task(cluster.client.post("/v1/completions", json=body([9, n], 2)))
            for n in range(3)
        ]
        try:
            await until(lambda: len(engine.arrived) == 3)
            yield cluster, engine, first
        finally:
            engine.allow()
            await asyncio.gather(*first)


def test_every_api_sends_retry_after(folder):
    async def run() -> dict[str, httpx.Response]:
        async with full(folder) as (cluster, engine, first):
            answers = {path: await cluster.client.post(path, json=w) for path, w in REQUEST.items()}
            stream = {**REQUEST["/v1/completions"], "stream": True}
            answers["stream"] = await cluster.client.post("/v1/completions", json=stream)
            background = {**REQUEST["/v1/responses"], "background": True, "store": True}
            answers["background"] = await cluster.client.post("/v1/responses", json=background)
            assert len(engine.arrived) == 3
            assert (await cluster.client.get("/health")).status_code == 200
            tokens = {"model": "fake", "prompt": "hi"}
            assert (await cluster.client.post("/tokenize", json=tokens)).status_code == 200
            metrics = (await cluster.client.get("/metrics")).text
            line = 'swell_refused_requests_total{reason="too_many_waiting_requests"} 6.0'
            assert line in metrics.splitlines()
            engine.allow()
            assert [answer.status_code for answer in await asyncio.gather(*first)] == [200] * 3
            again = await cluster.client.post("/v1/completions", json=body([1, 2], 2))
            assert again.status_code == 200
            return answers

    for path, answer in asyncio.run(run()).items():
        assert answer.status_code == 429, path
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-request-id"]
        error = answer.json()["error"]
        assert "serve.max_waiting_requests=2" in error["message"]
        if path == "/v1/messages":
            assert answer.json()["type"] == "error"
            assert error["type"] == "rate_limit_error"
        else:
            assert error["type"] == "rate_limit_exceeded"
            assert error["code"] == "too_many_waiting_requests"


def test_the_body_of_a_refused_request_is_not_read(folder):
    """A refused request is not read, except its key: a client without a valid key does not learn
    how full the cluster is."""
    (folder / "keys").write_text("secret\n")

    async def run() -> tuple[int, int, int]:
        settings = {"serve.api_keys_file": str(folder / "keys")}
        async with FakeCluster(folder, **settings).serving() as cluster:
            await cluster.join(0, NO_STEPS)
            cluster.client.headers["authorization"] = "Bearer secret"
            cluster.ingress.llm._admission._max_requests = 0
            post = cluster.client.post
            damaged = await post("/v1/completions", content=b'{"prompt": ')
            unauthorized = await post("/v1/completions", headers={"authorization": "Bearer no"})
            kept_alive = await post("/tokenize", json={"model": "fake", "prompt": "hi"})
            return damaged.status_code, unauthorized.status_code, kept_alive.status_code

    assert asyncio.run(run()) == (429, 401, 200)


def test_concurrent_requests_stay_within_the_waiting_bound(folder):
    """The bound holds even though each request is admitted before the others are submitted."""

    async def run() -> list[int]:
        settings = {"scheduler.max_rows": 1, "serve.max_waiting_requests": 4}
        async with FakeCluster(folder, **settings).serving() as cluster:
            engine = await cluster.join(0, NO_STEPS)
            tasks = [
                asyncio.create_task(cluster.client.post("/v1/completions", json=body([9, n], 2)))
                for n in range(40)
            ]
            await until(lambda: sum(task.done() for task in tasks) == 35)
            await until(lambda: len(engine.arrived) == 5)
            engine.allow()
            return [answer.status_code for answer in await asyncio.gather(*tasks)]

    statuses = asyncio.run(run())
    assert (statuses.count(200), statuses.count(429)) == (5, 35)


def test_running_requests_migrate_although_the_waiting_bound_is_reached(folder):
    async def run() -> int:
        settings = {"scheduler.max_rows": 1, "serve.max_waiting_requests": 1}
        async with FakeCluster(folder, **settings).serving() as cluster:
            first = await cluster.join(0, NO_STEPS)
            streams = [Stream(cluster, body([1, 2, n], 9)) for n in range(2)]
            await until(lambda: len(first.arrived) == 2)
            first.allow(3)
            for stream in streams:
                await stream.has(3)
            second = await cluster.join(1, NO_STEPS)
            await cluster.kill(first)
            await until(lambda: len(second.arrived) == 2)
            # One of them waits in the second engine for the only row.
            refused = await cluster.client.post("/v1/completions", json=body([5], 2))
            second.allow()
            for n, stream in enumerate(streams):
                assert (await stream.done).ids == truth([1, 2, n], 9)
            return refused.status_code

    assert asyncio.run(run()) == 429


# -------------------------------------------------------------------------------- time limits


@pytest.mark.parametrize("limit", ["0", "-1", "soon", "nan", "inf", "1e9", ""])
@pytest.mark.parametrize("path", REQUEST)
def test_an_invalid_time_limit_is_refused(folder, path, limit):
    async def run() -> httpx.Response:
        async with FakeCluster(folder).serving() as cluster:
            await cluster.join(0)
            return await cluster.client.post(path, json=REQUEST[path], headers={HEADER: limit})

    answer = asyncio.run(run())
    assert answer.status_code == 400
    assert HEADER in answer.json()["error"]["message"]
    assert f"{MAX_TIMEOUT_S:g}" in answer.json()["error"]["message"]


def limited(path: str, *, stream: bool = False) -> dict[str, Any]:
    return {**REQUEST[path], "stream": stream}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUEST)
def test_a_request_without_a_token_in_time_is_a_408_and_is_aborted(folder, path, stream):
    async def run() -> tuple[httpx.Response, list[str], list[str]]:
        async with FakeCluster(folder).serving() as cluster:
            engine = await cluster.join(0, NO_STEPS)
            sent = cluster.client.post(
                path, json=limited(path, stream=stream), headers={HEADER: "86400"}
            )
            answering = asyncio.create_task(sent)
            await until(lambda: engine.arrived)
            (timer,) = far_timers()
            timer._run()
            answer = await answering
            await until(lambda: engine.aborted)
            metrics = (await cluster.client.get("/metrics")).text
            assert 'swell_request_success_total{finished_reason="abort"} 1.0' in metrics
            return answer, [one.request_id for one in engine.arrived], engine.aborted

    answer, arrived, aborted = asyncio.run(run())
    assert aborted == arrived
    assert answer.status_code == 408
    error = answer.json()["error"]
    assert f"{HEADER}=86400" in error["message"]
    if path == "/v1/messages":
        assert error["type"] == "timeout_error"
    else:
        assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")


def test_a_request_that_waits_for_an_engine_ends_at_its_deadline(folder):
    async def run() -> httpx.Response:
        async with FakeCluster(folder).serving() as cluster:
            await cluster.join(0)
            await cluster.remove(0)
            payload = body([1, 2], 2)
            return await cluster.client.post(
                "/v1/completions", json=payload, headers={HEADER: "0.05"}
            )

    assert asyncio.run(run()).status_code == 408


def far_timers() -> list[asyncio.TimerHandle]:
    """Returns the timers of the loop that are due in 15 minutes or later."""
    loop: Any = asyncio.get_running_loop()
    return [t for t in loop._scheduled if not t.cancelled() and t.when() > loop.time() + 900]


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("path", REQUEST)
def test_a_stream_that_has_begun_ends_with_a_timeout_error(folder, path):
    payload = limited(path, stream=True)
    payload |= {"seed": 3} | {name: 9 for name in payload if name.startswith("max_")}

    async def run() -> str:
        async with FakeCluster(folder).serving() as cluster:
            engine = await cluster.join(0, 2)
            headers = {HEADER: "86400"}
            async with cluster.client.stream("POST", path, json=payload, headers=headers) as answer:
                assert answer.status_code == 200
                (timer,) = far_timers()
                timer._run()
                text = b"".join([part async for part in answer.aiter_bytes()]).decode()
            await until(lambda: engine.aborted)
            return text

    text = asyncio.run(run())
    last = events(text)[-1]
    if path == "/v1/responses":
        assert last["type"] == "response.failed"
        assert HEADER in last["response"]["error"]["message"]
        return
    assert HEADER in last["error"]["message"]
    if path == "/v1/messages":
        assert last["error"]["type"] == "timeout_error"
    else:
        assert last["error"]["code"] == "request_timeout"
        assert last["error"]["type"] == "timeout_error"
        assert text.endswith("data: [DONE]\n\n")


def test_an_answer_before_its_deadline_is_whole_and_leaves_no_timer(folder):
    async def run() -> tuple[int, int]:
        async with FakeCluster(folder).serving() as cluster:
            await cluster.join(0)
            for path, payload in REQUEST.items():
                for stream in (False, True):
                    answer = await cluster.client.post(
                        path, json={**payload, "stream": stream}, headers={HEADER: "86400"}
                    )
                    assert answer.status_code == 200, answer.text
            return len(far_timers()), len(events(answer.text))

    far, num_events = asyncio.run(run())
    assert num_events
    assert far == 0
