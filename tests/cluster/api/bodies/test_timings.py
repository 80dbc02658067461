"""With `include_timings`, and only then, an answer reports what happened to its request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from swell.cluster.api.bodies.timings import timings_of
from swell.cluster.client.requests.journey import Journey
from swell.cluster.client.requests.request_history import RequestRecord
from swell.engine.wire import JourneyEventType as Kind
from tests.cluster.fake_cluster import FakeCluster, body
from tests.cluster.text import tokenizers_for_tests
from tests.support.core_requests import finished_stats

HELLO = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [1, 2], "max_tokens": 3},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": HELLO, "max_tokens": 3},
}
LAST = {
    "/v1/responses": {"response.incomplete", "response.completed"},
    "/v1/messages": {"message_delta"},
}
"""Route -> types of the events with timings. The other streams have them in the last event."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def find(path: str, stream: bool, answer: httpx.Response) -> Any:
    """Returns the timings of an answer, or None. At most one event of a stream may have them."""
    if not stream:
        return answer.json().get("timings")
    events = events_of(answer)
    if path == "/v1/responses":
        events = [{**event, **event.get("response", {})} for event in events]
    having = [event for event in events if "timings" in event]
    if not having:
        return None
    (last,) = having
    if path in LAST:
        assert last["type"] in LAST[path] or last["object"] == "response"
    else:
        assert last is events[-1]
        assert last["choices"] == []
        assert "usage" not in last
    return last["timings"]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_an_answer_has_timings_on_request(folder: Path, path: str, stream: bool) -> None:
    async def run() -> None:
        async with FakeCluster(folder).serving() as cluster:
            await cluster.join(2)
            for wanted in (True, False, None):
                payload = {**BODIES[path], "stream": stream, "include_timings": wanted}
                answer = await cluster.client.post(path, json=payload)
                assert answer.status_code == 200, answer.text
                timings = find(path, stream, answer)
                assert bool(timings) == bool(wanted)
                if timings:
                    (choice,) = timings["choices"]
                    assert choice["events_left_out"] == 0
                    names = [event["event"] for event in choice["events"]]
                    assert names[:2] == ["received", "routed"]
                    assert names[-2:] == ["first_token", "finished"]
                    assert {event["rank"] for event in choice["events"][1:]} == {2}

    asyncio.run(run())


@pytest.mark.slow
def test_the_last_event_may_have_usage_and_timings(folder: Path) -> None:
    async def run() -> None:
        async with FakeCluster(folder).serving() as cluster:
            await cluster.join(0)
            options = {"include_usage": True}
            payload = body([1, 2], 3, n=2, stream=True, stream_options=options)
            payload["include_timings"] = True
            answer = await cluster.client.post("/v1/completions", json=payload)
            *before, last = events_of(answer)
            assert last["usage"]["completion_tokens"] == 6
            assert [choice["index"] for choice in last["timings"]["choices"]] == [0, 1]
            assert all("timings" not in event and event["usage"] is None for event in before)

    asyncio.run(run())


def test_milliseconds_count_from_the_arrival_of_the_request() -> None:
    journey = Journey()
    journey.add(Kind.ROUTED, 99.9, 4, 1)  # loop clocks have a resolution of 1 ms
    journey.add(Kind.FIRST_TOKEN, 100.5, 4, 1)
    journey.finish(102.0, 4, 1, finished_stats("stop"))
    record = RequestRecord("cmpl-a", "a", "chat", "m", 100.0, 1.7e9, [journey])
    (choice,) = timings_of(record).choices
    seen = [(event.event, event.ms, event.hop_ms, event.reason) for event in choice.events]
    assert seen == [
        ("received", 0.0, 0.0, None),
        ("routed", 0.0, 0.0, None),
        ("first_token", 500.0, 500.0, None),
        ("finished", 2000.0, 1500.0, "stop"),
    ]
