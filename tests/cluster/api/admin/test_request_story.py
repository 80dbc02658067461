"""`GET /admin/requests/ID` reports what happened to a request that any ingress served."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from swell.cluster.api.admin.protocol import RequestStory
from tests.cluster.fake_cluster import FakeCluster, Stream, body, until
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

Scene = Callable[[FakeCluster], Awaitable[None]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def play(folder: Path, scene: Scene, **settings: object) -> None:
    async def run() -> None:
        async with FakeCluster(folder, **settings).serving() as cluster:
            await scene(cluster)

    asyncio.run(run())


async def story(cluster: FakeCluster, id: str) -> dict[str, Any]:
    answer = await cluster.client.get(f"/admin/requests/{id}")
    assert answer.status_code == 200, answer.text
    assert answer.json()["complete"]
    (found,) = answer.json()["requests"]
    return found


def events_of(timings: dict[str, Any], choice: int = 0) -> list[tuple[str, Any, Any]]:
    events = timings["choices"][choice]["events"]
    times = [event["ms"] for event in events]
    assert times == sorted(times)
    hops = [event["hop_ms"] for event in events]
    assert hops[0] == 0
    assert sum(hops) == pytest.approx(times[-1], abs=0.01)
    return [(event["event"], event["rank"], event["attempt"]) for event in events]


def test_a_request_is_found_by_both_of_its_ids(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(3)
        sent = {"x-request-id": "job/7"}
        answer = await cluster.client.post("/v1/completions", json=body([1, 2], 4), headers=sent)
        found = await story(cluster, "job/7")
        assert found == await story(cluster, answer.json()["id"])
        assert (found["id"], found["request_id"]) == ("cmpl-job/7", "job/7")
        assert not found["running"]
        assert found["operation"] == "text_completion"
        assert events_of(found["timings"]) == [
            ("received", None, None),
            ("routed", 3, 1),
            ("queued", 3, 1),
            ("scheduled", 3, 1),
            ("first_token", 3, 1),
            ("finished", 3, 1),
        ]
        assert found["timings"]["choices"][0]["events"][-1]["reason"] == "length"

    play(folder, scene)


def test_a_resubmitted_request_shows_both_engines_while_it_runs(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        first = await cluster.join(0, steps=3)
        stream = Stream(cluster, body([1, 2], 20))
        await stream.has(3)
        id = stream.headers["x-request-id"]
        assert (await story(cluster, id))["running"]
        await cluster.kill(first)
        found = await story(cluster, id)
        assert events_of(found["timings"])[-2:] == [("resubmitted", 0, 1), ("queued", None, None)]
        reason = found["timings"]["choices"][0]["events"][-2]["reason"]
        assert reason == "the engine was lost"
        await cluster.join(1)
        await stream.done
        await until(lambda: not cluster.ingress.llm._processor.request_states)
        assert events_of((await story(cluster, id))["timings"])[-5:] == [
            ("routed", 1, 2),
            ("queued", 1, 2),
            ("scheduled", 1, 2),
            ("first_token", 1, 2),
            ("finished", 1, 2),
        ]

    play(folder, scene)


def test_each_answer_has_its_own_events(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        payload = body([1, 2], 4, n=2)
        answer = await cluster.client.post("/v1/completions", json=payload)
        choices = (await story(cluster, answer.headers["x-request-id"]))["timings"]["choices"]
        assert [choice["index"] for choice in choices] == [0, 1]
        assert all(choice["events"][-1]["event"] == "finished" for choice in choices)

    play(folder, scene)


def test_a_forgotten_request_is_a_404_that_names_the_retention(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        first = await cluster.client.post("/v1/completions", json=body([1], 2))
        second = await cluster.client.post("/v1/completions", json=body([1], 2))
        await story(cluster, second.json()["id"])
        gone = await cluster.client.get(f"/admin/requests/{first.json()['id']}")
        assert gone.status_code == 404
        assert gone.json()["error"]["code"] == "request_not_found"
        assert "for 77 s" in gone.json()["error"]["message"]

    play(folder, scene, **{"serve.request_history": 1, "serve.request_history_s": 77})


class Peers:
    """Finds requests at the other ingress, which is in this process."""

    def __init__(self) -> None:
        self.others: list[Any] = []
        self.answers = True

    async def find(self, id: str, asking: int) -> tuple[list[RequestStory], bool]:
        found = [story for other in self.others for story in other.find_requests(id, asking)]
        return found if self.answers else [], self.answers


def test_an_ingress_finds_requests_that_another_one_served(folder: Path) -> None:
    """Every ingress is asked once, including the one that asks. A silent ingress may have known the
    request, so the answer is marked incomplete."""

    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0)
        peers = Peers()
        cluster.ingress.services.peers = peers
        async with cluster.another_ingress(None) as (other, url):
            peers.others = [cluster.ingress, other]
            sent = {"x-request-id": "mine"}
            for base in (url, ""):
                payload = body([1], 2)
                await cluster.client.post(f"{base}/v1/completions", json=payload, headers=sent)
            found = (await cluster.client.get("/admin/requests/mine")).json()["requests"]
            numbers = [one["ingress"] for one in found]
            assert numbers == [other.llm.client_index, cluster.ingress.llm.client_index]
            peers.answers = False
            alone = (await cluster.client.get("/admin/requests/mine")).json()
            assert not alone["complete"]
            assert len(alone["requests"]) == 1
            silent = await cluster.client.get("/admin/requests/other")
            assert (silent.status_code, silent.json()["error"]["code"]) == (503, "ingress_silent")

    play(folder, scene)


def test_only_operators_may_read_a_request(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("user\n")
    ops = tmp_path / "ops"
    ops.write_text("operator\n")

    async def scene(cluster: FakeCluster) -> None:
        for key, status in (("user", 401), ("operator", 404)):
            answer = await cluster.client.get("/admin/requests/x", headers={"x-api-key": key})
            assert answer.status_code == status, key

    play(folder, scene, **{"serve.api_keys_file": str(keys), "serve.admin_keys_file": str(ops)})
