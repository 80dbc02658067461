"""If an engine cannot continue a request, the client is told so, and the request is counted as an
error."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.client.failover.test_failover import play
from tests.cluster.fake_cluster import FakeCluster, FakeEngine, Stream, body, truth, until
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

WHY = "the model's logits for this request are NaN or infinite"
ERRORS = 'swell_request_success_total{finished_reason="error"}'
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": 60}

ANSWERS = [
    ("/v1/completions", body([1], 60)),
    ("/v1/completions", body([1], 60, n=3)),
    ("/v1/completions", body([1], 60, stream=True)),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
    ("/v1/responses", {"model": "fake", "input": "a"}),
    ("/v1/messages", CHAT),
    ("/v1/messages", {**CHAT, "stream": True}),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


async def answer_of(cluster: FakeCluster, engine: FakeEngine, path: str, payload: Any) -> Any:
    asked = asyncio.create_task(cluster.client.post(path, json=payload))
    await until(lambda: engine.requests)
    engine.fail(WHY)
    return await asked


@pytest.mark.parametrize(("path", "payload"), ANSWERS)
def test_a_failure_before_the_first_token_is_a_500_with_its_reason(
    folder: Path, path: str, payload: Any
) -> None:
    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0, steps=0)
        answer = await answer_of(cluster, engine, path, payload)
        error = answer.json()["error"]
        assert (answer.status_code, error["message"]) == (500, WHY)
        assert error.get("code", "request_failed") == "request_failed"
        assert await cluster.metric(ERRORS) >= 1
        assert len(engine.arrived) == (payload.get("n") or 1), "nobody else gets it"

    play(folder, scene)


def failures(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Returns the fields of the log lines about failed requests."""
    lines = (record for record in caplog.records if record.message == "request failed")
    return [vars(record)["fields"] for record in lines]


@pytest.mark.parametrize(("path", "payload"), ANSWERS)
def test_the_log_names_the_request_and_the_reason(
    folder: Path, path: str, payload: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0, steps=0)
        await answer_of(cluster, engine, path, payload)
        found = failures(caplog)
        assert len(found) == await cluster.metric(ERRORS)
        for line in found:
            assert (line["reason"], line["ranks"]) == (WHY, [0])
            story = await cluster.client.get(f"/admin/requests/{line['id']}")
            assert [each["request_id"] for each in story.json()["requests"]] == [line["id"]]

    play(folder, scene)


def test_the_log_names_a_request_that_found_no_engine(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.kill(await cluster.join(0))
        answer = await cluster.client.post("/v1/completions", json=body([1], 60))
        assert answer.status_code == 503
        (line,) = failures(caplog)
        assert line["ranks"] == [] and line["reason"].startswith("NoEngine: ")

    play(folder, scene, **{"serve.no_engine_timeout_s": 0.1})


def test_a_stream_that_began_ends_with_an_error(folder: Path) -> None:
    """The client keeps the text before the error, even if a stop string could begin in it."""

    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0, steps=3)
        stream = Stream(cluster, body([1], 60))
        await stream.has(3)
        engine.fail(WHY)
        await stream.done
        assert stream.ids == truth([1], 3) and stream.finish_reason is None
        assert stream.error is not None
        assert (stream.error["code"], stream.error["message"]) == ("request_failed", WHY)
        assert await cluster.metric(ERRORS) == 1
        engine.allow()
        assert (await Stream(cluster, body([2], 5)).done).ids == truth([2], 5)

    play(folder, scene)
