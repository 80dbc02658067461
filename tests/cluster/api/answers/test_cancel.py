"""`POST /v1/cancel` and `/abort_requests` end requests by id at any ingress, and say the truth."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from swell.cluster.api.ingress import Ingress
from swell.cluster.client.requests.request_history import CancelStatus
from swell.engine.wire import EngineCoreRequest
from tests.cluster.fake_cluster import FakeCluster, FakeEngine, Stream, body, truth, until
from tests.cluster.store_handle import StoreOfTest
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

Scene = Callable[[FakeCluster], Awaitable[None]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def play(folder: Path, scene: Scene, store: Any = None, **settings: object) -> None:
    async def run() -> None:
        cluster = FakeCluster(folder, **settings)
        cluster.store = store
        async with cluster.serving():
            await scene(cluster)
            llm = cluster.ingress.llm
            await until(lambda: not (llm._processor.request_states or llm._placer._queue))

    asyncio.run(run())


async def cancel(
    cluster: FakeCluster, *ids: str, base: str = "", key: str = "none"
) -> tuple[int, dict[str, str]]:
    """Returns the status and what happened to each id."""
    answer = await cluster.client.post(
        f"{base}/v1/cancel", json={"ids": list(ids)}, headers={"x-api-key": key}
    )
    results = answer.json().get("results", [])
    return answer.status_code, {one["id"]: one["status"] for one in results}


async def run_steps(cluster: FakeCluster, engine: FakeEngine, tokens: int) -> None:
    """Waits until every request has this many tokens, which the engine computes now."""
    engine.allow(tokens)
    states = cluster.ingress.llm._processor.request_states
    await until(lambda: all(len(one.output_token_ids) == tokens for one in states.values()))


class Peers:
    """Reaches the other ingresses, which are in this process."""

    def __init__(self, *ingresses: Ingress) -> None:
        self.ingresses = ingresses
        self.answers = True

    async def cancel(
        self, ids: Sequence[str], owner: str, asking: int
    ) -> tuple[list[dict[str, CancelStatus]], bool]:
        if not self.answers:
            return [], False
        return [one.cancel_requests(ids, owner, asking) for one in self.ingresses], True


def test_a_cancelled_stream_ends_with_its_text_so_far(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0, steps=3)
        stream = Stream(cluster, body([1, 2], 20))
        await stream.has(3)
        id = stream.headers["x-request-id"]
        assert await cancel(cluster, f"cmpl-{id}") == (200, {f"cmpl-{id}": "cancelled"})
        await stream.done
        assert (stream.ids, stream.finish_reason) == (truth([1, 2], 3), "abort")
        await until(lambda: engine.aborted)
        assert not engine.requests
        await until(lambda: not cluster.ingress.llm._processor.request_states)
        assert await cancel(cluster, id) == (200, {id: "cancelled"})

    play(folder, scene)


def test_all_answers_of_a_whole_response_end(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0, steps=0)
        payload = {**body([], 20, n=2), "prompt": [[1], [2]]}
        sent = {"x-request-id": "job/7"}
        post = cluster.client.post("/v1/completions", json=payload, headers=sent)
        whole = asyncio.create_task(post)
        await until(lambda: len(engine.arrived) == 4)
        await run_steps(cluster, engine, 3)
        assert await cancel(cluster, "job/7") == (200, {"job/7": "cancelled"})
        choices = (await whole).json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["abort"] * 4
        assert [choice["token_ids"] for choice in choices] == [
            truth([prompt], 3, 3 + index) for prompt in (1, 2) for index in (0, 1)
        ]

    play(folder, scene)


def test_a_request_is_cancelled_while_its_answers_are_submitted(folder: Path) -> None:
    """Many answers are submitted a few at a time: those that were not submitted yet never are."""

    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0, steps=0)
        services, submitted = cluster.ingress.services, list[str]()
        submit = cluster.ingress.llm.submit

        def submit_and_cancel(request: EngineCoreRequest, *rest: Any, **more: Any) -> Any:
            if not submitted:
                asyncio.get_running_loop().call_soon(services.recorder.cancel, ["job"], "")
            submitted.append(request.request_id)
            return submit(request, *rest, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cluster.ingress.llm, "submit", submit_and_cancel)
            answer = await cluster.client.post(
                "/v1/completions", json=body([1], 4, n=128), headers={"x-request-id": "job"}
            )
        assert (answer.status_code, answer.json()["error"]["code"]) == (499, "request_cancelled")
        assert 0 < len(submitted) < 128

    play(folder, scene)


def test_a_request_is_cancelled_while_no_engine_has_it_and_after_its_engine_was_lost(
    folder: Path,
) -> None:
    async def scene(cluster: FakeCluster) -> None:
        first = await cluster.join(0, steps=3)
        stream = Stream(cluster, body([1, 2], 20))
        await stream.has(3)
        moved = Stream(cluster, body([7], 20))
        await until(lambda: len(first.arrived) == 2)
        await cluster.kill(first)
        id = stream.headers["x-request-id"]
        assert await cancel(cluster, id) == (200, {id: "cancelled"})
        assert (await stream.done).finish_reason == "abort"
        second = await cluster.join(1, steps=2)
        await moved.has(2)
        id = moved.headers["x-request-id"]
        assert await cancel(cluster, id) == (200, {id: "cancelled"})
        assert (await moved.done).ids == truth([7], 2)
        await until(lambda: second.aborted)
        assert [request.request_id for request in second.arrived] == second.aborted

    play(folder, scene)


def test_any_ingress_cancels_a_request_unless_another_is_silent(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0, steps=3)
        async with cluster.another_ingress(None) as (other, url):
            peers = Peers(cluster.ingress, other)
            other.services.peers = peers
            stream = Stream(cluster, body([1, 2], 20))
            await stream.has(3)
            id = stream.headers["x-request-id"]
            peers.answers = False
            silent = await cluster.client.post(f"{url}/v1/cancel", json={"request_id": id})
            assert (silent.status_code, silent.json()["error"]["code"]) == (503, "ingress_silent")
            peers.answers = True
            assert await cancel(cluster, id, "no such", base=url) == (
                200,
                {id: "cancelled", "no such": "not_found"},
            )
            assert (await stream.done).finish_reason == "abort"
            peers.answers = False
            answer = await cluster.client.post(f"{url}/abort_requests", json={"request_ids": [id]})
            assert answer.json()["results"] == [{"id": id, "status": "unknown"}]

    play(folder, scene)


def test_a_user_cancels_only_requests_of_the_same_key(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("mine\nother\n")

    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0, steps=0)
        headers = {"x-api-key": "mine", "x-request-id": "job"}
        post = cluster.client.post("/v1/completions", json=body([1], 20), headers=headers)
        whole = asyncio.create_task(post)
        await until(lambda: engine.arrived)
        await run_steps(cluster, engine, 2)
        assert (await cancel(cluster, "job"))[0] == 401
        assert await cancel(cluster, "job", key="other") == (404, {})
        assert len(engine.requests) == 1
        assert await cancel(cluster, "job", key="mine") == (200, {"job": "cancelled"})
        assert (await whole).json()["choices"][0]["token_ids"] == truth([1], 2)

    play(folder, scene, **{"serve.api_keys_file": str(keys)})


@pytest.mark.parametrize(
    ("path", "payload", "stream_error"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}, "error"),
        ("/v1/responses", {"input": "a"}, "response.failed"),
    ],
)
def test_an_api_without_such_a_finish_reason_answers_with_an_error(
    folder: Path, path: str, payload: dict[str, Any], stream_error: str
) -> None:
    """A message that claims to be complete would be false."""

    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0, steps=0)
        sent = {"model": "fake", **payload}
        sent |= {"max_tokens": 40} if path == "/v1/messages" else {"max_output_tokens": 40}

        async def post(*, stream: bool) -> httpx.Response:
            headers = {"x-request-id": "one"}
            body = {**sent, "stream": stream}
            answer = asyncio.create_task(cluster.client.post(path, json=body, headers=headers))
            already = len(engine.arrived)
            await until(lambda: len(engine.arrived) > already)
            await run_steps(cluster, engine, 2)
            assert await cancel(cluster, "one") == (200, {"one": "cancelled"})
            return await answer

        whole = await post(stream=False)
        assert whole.status_code == 499
        assert "cancelled" in whole.json()["error"]["message"]
        streamed = await post(stream=True)
        assert f"event: {stream_error}" in streamed.text
        assert "message_stop" not in streamed.text

    play(folder, scene, StoreOfTest().new_handle())


@pytest.mark.parametrize(
    ("path", "sent", "says"),
    [
        ("/v1/cancel", {}, "request_id"),
        ("/v1/cancel", {"request_id": "a", "ids": ["b"]}, "either"),
        ("/v1/cancel", {"ids": []}, "ids"),
        ("/v1/cancel", {"ids": ["a"] * 1001}, "ids holds 1001 ids; at most 1000"),
        ("/v1/cancel", {"ids": ["a" * 300]}, "ids[0]"),
        ("/v1/cancel", {"request_id": 7}, "request_id"),
        ("/v1/cancel", {"id": "a"}, "id"),
        ("/abort_requests", {}, "request_ids"),
        ("/abort_requests", {"request_ids": [""]}, "request_ids[0]"),
    ],
)
def test_a_wrong_body_is_refused(folder: Path, path: str, sent: dict[str, Any], says: str) -> None:
    async def scene(cluster: FakeCluster) -> None:
        answer = await cluster.client.post(path, json=sent)
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]

    play(folder, scene)


def test_unknown_ids_are_named_as_such(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        alone = await cluster.client.post("/v1/cancel", json={"request_id": "x"})
        assert (alone.status_code, alone.json()["error"]["code"]) == (404, "request_not_found")
        # vLLM answers 200 in any case.
        answer = await cluster.client.post("/abort_requests", json={"request_ids": ["x"]})
        assert answer.status_code == 200
        assert answer.json()["results"] == [{"id": "x", "status": "not_found"}]
        none = await cluster.client.post("/abort_requests", json={"request_ids": []})
        assert (none.status_code, none.json()["results"]) == (200, [])

    play(folder, scene)
