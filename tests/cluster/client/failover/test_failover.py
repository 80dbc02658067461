"""Answers that stream while engines fail equal those of an undisturbed run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import openai
import pytest

from swell.coordinator import roster as rosters
from swell.coordinator.roster import MemberState
from swell.engine.wire import EngineCoreOutput, FinishReason
from tests.cluster.fake_cluster import FakeCluster, FakeCoordinator, Stream, body, truth, until
from tests.cluster.text import tokenizers_for_tests
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

RESUBMITTED = "swell_resubmitted_requests_total"

Scene = Callable[[FakeCluster], Awaitable[None]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


def play(folder: Path, scene: Scene, **settings: object) -> None:
    async def run() -> None:
        async with FakeCluster(folder, **settings).serving() as cluster:
            await scene(cluster)
            llm = cluster.ingress.llm
            await until(lambda: not (llm._processor.request_states or llm._placer._queue))

    asyncio.run(run())


def test_a_lost_engine_is_replaced_by_another(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        first = await cluster.join(0, steps=3)
        stream = Stream(cluster, body([1, 2], 20))
        await stream.has(3)
        whole = asyncio.create_task(cluster.client.post("/v1/completions", json=body([7], 20)))
        await until(lambda: len(first.arrived) == 2)
        await cluster.join(1)
        await cluster.kill(first)
        await stream.done
        assert stream.ids == truth([1, 2], 20)
        assert stream.headers["x-swell-engine"] == "0"
        assert stream.comments == [": x-swell-engine 0,1"]
        answer = await whole
        assert answer.json()["choices"][0]["token_ids"] == truth([7], 20)
        assert answer.headers["x-swell-engine"] == "0,1"
        assert await cluster.metric(RESUBMITTED) == 2

    play(folder, scene)


def test_a_successor_at_the_same_rank_is_another_engine(folder: Path) -> None:
    """Removal and join arrive in one view, so only the incarnation differs."""

    async def scene(cluster: FakeCluster) -> None:
        first = await cluster.join(0, steps=4)
        stream = Stream(cluster, body([5], 30))
        await stream.has(4)
        await asyncio.to_thread(first.close)
        second = cluster.start(0).member
        await cluster.change(lambda now: rosters.join(rosters.remove(now, [0]), [second]))
        assert (await stream.done).ids == truth([5], 30)
        assert stream.comments == [": x-swell-engine 0,0"]

    play(folder, scene)


def test_requests_of_a_repairing_engine_move_to_another_one(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        first = await cluster.join(0, steps=3)
        stream = Stream(cluster, body([1], 20))
        await stream.has(3)
        await cluster.mark(0, MemberState.REPAIRING)
        await until(lambda: cluster.ingress.llm.active_ranks == [])
        assert not first.aborted and not stream.done.done()
        await cluster.join(1)
        assert (await stream.done).ids == truth([1], 20)
        await until(lambda: not first.requests)
        assert first.aborted == [first.arrived[0].request_id]

    play(folder, scene)


def test_the_only_engine_keeps_its_requests_during_a_repair(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        first = await cluster.join(0, steps=3)
        stream = Stream(cluster, body([1], 20))
        await stream.has(3)
        await cluster.mark(0, MemberState.REPAIRING)
        late = Stream(cluster, body([9], 10))
        await until(lambda: cluster.ingress.llm._placer._queue)
        await cluster.mark(0, MemberState.ACTIVE)
        first.allow()
        assert (await stream.done).ids == truth([1], 20)
        assert (await late.done).ids == truth([9], 10)
        assert not first.aborted and not stream.comments and not late.comments
        assert await cluster.metric(RESUBMITTED) == 0

    play(folder, scene)


@pytest.mark.parametrize("recount", [True, False])
def test_an_unrequested_abort_does_not_end_a_request(folder: Path, recount: bool) -> None:
    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0, steps=3)
        stream = Stream(cluster, body([1], 20))
        await stream.has(3)
        engine.disconnect_clients(recount=recount)
        await until(lambda: len(engine.arrived) == 2)
        engine.allow()
        assert (await stream.done).ids == truth([1], 20)
        assert stream.finish_reason == "length"
        assert stream.comments == [": x-swell-engine 0,0"]

    play(folder, scene)


@pytest.mark.parametrize("lost", [1, 2, 5])
def test_outputs_of_lost_messages_are_computed_again(folder: Path, lost: int) -> None:
    """The ingress ignores what the engine still sends for the abandoned attempt before it receives
    the abort."""

    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0, steps=0)
        streams = [Stream(cluster, body([n], 40)) for n in range(3)]
        await until(lambda: len(engine.requests) == 3)
        engine.allow(3)
        for stream in streams:
            await stream.has(3)
        engine.lose(lost)
        engine.allow()
        for n, stream in enumerate(streams):
            assert (await stream.done).ids == truth([n], 40)
            assert stream.headers["x-swell-engine"] == "0"
            assert stream.comments == [": x-swell-engine 0,0"]
        assert sorted(engine.aborted) == sorted(r.request_id for r in engine.arrived[:3])

    play(folder, scene)


def test_a_restarted_message_count_means_lost_messages(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0, steps=3)
        stream = Stream(cluster, body([1], 20))
        await stream.has(3)
        engine.call(engine.counts.clear)
        engine.allow()
        assert (await stream.done).ids == truth([1], 20)
        assert len(engine.arrived) == 2

    play(folder, scene)


def test_a_request_waits_for_an_engine(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.kill(await cluster.join(0))
        wishes = [body([1], 5), body([2], 5, data_parallel_rank=2)]
        waiting = [
            asyncio.create_task(cluster.client.post("/v1/completions", json=payload))
            for payload in wishes
        ]
        leaving = asyncio.create_task(cluster.client.post("/v1/completions", json=body([3], 5)))
        await until(lambda: len(cluster.ingress.llm._placer._queue) == 3)
        leaving.cancel()
        await until(lambda: len(cluster.ingress.llm._placer._queue) == 2)
        first = await cluster.join(1)
        answer = await waiting[0]
        assert answer.json()["choices"][0]["token_ids"] == truth([1], 5)
        assert [r.prompt_token_ids for r in first.arrived] == [[1]]
        await cluster.join(2)
        assert (await waiting[1]).headers["x-swell-engine"] == "2"
        assert await cluster.metric(RESUBMITTED) == 0, "they only arrived"

    play(folder, scene)


def test_an_ingress_without_engines_holds_requests_for_the_first_one(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        early = asyncio.create_task(cluster.client.post("/v1/completions", json=body([7], 5)))
        count = asyncio.create_task(cluster.client.post("/tokenize", json={"prompt": "the fox"}))
        llm = cluster.ingress.llm
        await until(lambda: llm._num_early == 2)
        refused = await cluster.client.post("/v1/completions", json=body([8], 5))
        assert refused.json()["error"]["code"] == "no_engine"
        assert "2 requests already wait" in refused.json()["error"]["message"]
        await cluster.join(0)
        answer = await early
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == truth([7], 5)
        assert (await count).status_code == 200
        assert llm._num_early == 0

    play(folder, scene, **{"serve.max_waiting_requests": 2})


def test_the_wait_for_the_first_engine_has_a_deadline(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        early = await cluster.client.post("/v1/completions", json=body([7], 5))
        assert early.status_code == 503
        assert early.json()["error"]["code"] == "no_engine"
        assert "waited 0.1 s" in early.json()["error"]["message"]

    play(folder, scene, **{"serve.no_engine_timeout_s": 0.1})


def test_the_wait_for_an_engine_has_a_deadline(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        first = await cluster.join(0, steps=2)
        stream = Stream(cluster, body([1], 20))
        await stream.has(2)
        await cluster.kill(first)
        late = await cluster.client.post("/v1/completions", json=body([2], 5))
        assert late.status_code == 503
        assert late.headers["retry-after"] == "1"
        assert late.json()["error"]["code"] == "no_engine"
        assert "waited 0.1 s" in late.json()["error"]["message"]
        assert not stream.done.done(), "what has begun waits for as long as a start may take"
        (queued,) = cluster.ingress.llm._placer._queue._queued.values()
        queued._timer._run()
        await stream.done
        assert stream.ids == truth([1], 2)
        assert stream.error is not None and stream.error["code"] == "no_engine"

    play(folder, scene, **{"serve.no_engine_timeout_s": 0.1})


def test_a_stream_survives_fifty_rescales(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0, steps=1)
        stream = Stream(cluster, body([1], 60))
        for rank in range(1, 51):
            await stream.has(rank)
            await cluster.join(rank, steps=1)
            await cluster.mark(rank - 1, MemberState.LEAVING)
            await cluster.detach(rank - 1)
        cluster.engines[-1].allow()
        assert (await stream.done).ids == truth([1], 60)
        assert stream.comments == [": x-swell-engine " + ",".join(map(str, range(51)))]
        assert await cluster.metric(RESUBMITTED) == 50

    play(folder, scene)


@pytest.mark.parametrize("begun", [True, False])
def test_a_request_that_crashed_two_engines_fails(folder: Path, begun: bool) -> None:
    """A request that gained a token from the first engine is not blamed for its loss. It fails
    after two losses of its own."""

    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0, steps=int(begun))
        stream = Stream(cluster, body([1], 60)) if begun else None
        if stream is not None:
            await stream.has(1)
        whole = asyncio.create_task(cluster.client.post("/v1/completions", json=body([2], 60)))

        async def lose(rank: int, held: int) -> None:
            """Kills the engine while all its requests are in its last step. Another engine has
            joined before."""
            engine = cluster.engines[rank]
            await until(lambda: len(engine.requests) == held)
            await cluster.join(rank + 1, steps=0)
            engine.begin()
            states = cluster.ingress.llm._processor.request_states.values()
            await until(lambda: all(state.started for state in states))
            await cluster.kill(engine)

        await lose(0, 1 + begun)
        assert [r.failed_attempts for r in cluster.engines[0].arrived] == [0] * (1 + begun)
        await lose(1, 1 + begun)
        answer = await whole
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["code"] == "engine_failed" and "engines [0, 1]" in error["message"]
        if stream is not None:
            assert stream.error is None
            await lose(2, 1)
            await stream.done
            assert stream.ids == truth([1], 1)
            assert stream.error is not None and stream.error["code"] == "engine_failed"
            assert stream.comments == [": x-swell-engine 0,1,2"]
            told = {r.prompt_token_ids[0]: r.failed_attempts for r in cluster.engines[2].arrived}
            assert told == {1: 1}

    play(folder, scene)


def test_a_waiting_request_is_not_blamed_for_a_lost_engine(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        await cluster.join(0, steps=0)
        whole = asyncio.create_task(cluster.client.post("/v1/completions", json=body([2], 20)))
        for rank in range(8):
            await until(lambda: cluster.engines[-1].requests)
            await cluster.join(rank + 1, steps=0)
            await cluster.kill(cluster.engines[rank])
        cluster.engines[-1].allow()
        assert (await whole).json()["choices"][0]["token_ids"] == truth([2], 20)
        assert {r.failed_attempts for e in cluster.engines for r in e.arrived} == {0}

    play(folder, scene)


def test_a_restarted_coordinator_continues_at_its_address(folder: Path) -> None:
    """Answers stream meanwhile. The successor is told the epoch from which to continue."""

    async def scene(cluster: FakeCluster) -> None:
        first = await cluster.join(0, steps=3)
        stream = Stream(cluster, body([1], 20))
        await stream.has(3)
        roster = cluster.ingress.llm.view.roster
        await asyncio.to_thread(cluster.coordinator.close)
        first.allow(3)
        await stream.has(6)
        cluster.coordinator = FakeCoordinator(cluster.coordinator)
        await until(lambda: cluster.coordinator.epochs_seen)
        assert set(cluster.coordinator.epochs_seen) == {roster.epoch}
        cluster.coordinator.publish(roster=rosters.update_members(roster, [0], vocab_size=400))
        await until(lambda: cluster.ingress.llm.view.roster.epoch == roster.epoch + 1)
        await cluster.join(1)
        await cluster.kill(first)
        assert (await stream.done).ids == truth([1], 20)
        assert stream.comments == [": x-swell-engine 0,1"]

    play(folder, scene)


def test_a_waiting_ingress_sends_keep_alives(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0)
        await until(lambda: engine.keep_alives > 2)

    play(folder, scene, **{"cluster.stall_timeout_s": 4.0})


def test_several_prompts_move_together(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        first = await cluster.join(0, steps=3)
        payload = {**body([], 20), "prompt": [[1], [2, 2]]}
        whole = asyncio.create_task(cluster.client.post("/v1/completions", json=payload))
        await until(lambda: len(first.requests) == 2)
        await cluster.join(1)
        await cluster.kill(first)
        answer = await whole
        choices = answer.json()["choices"]
        assert [c["token_ids"] for c in choices] == [truth([1], 20), truth([2, 2], 20)]
        assert answer.headers["x-swell-engine"] == "0,1"
        assert answer.json()["usage"]["completion_tokens"] == 40

    play(folder, scene)


def test_the_client_library_reads_a_stream_that_moved(folder: Path) -> None:
    async def scene(cluster: FakeCluster) -> None:
        first = await cluster.join(0, steps=3)
        client = openai.AsyncOpenAI(
            base_url=f"{cluster.client.base_url}/v1", api_key="none", timeout=HANG_S
        )
        payload = {"model": "fake", "prompt": [1], "max_tokens": 20, "seed": 3}
        async with client:
            chunks = await client.completions.create(**payload, stream=True)
            parts = []
            async for chunk in chunks:
                parts.append(chunk.choices[0].text)
                if len(parts) == 1:  # tokens that arrive together make one chunk
                    await cluster.join(1)
                    await cluster.kill(first)
            undisturbed = await client.completions.create(**payload)
        assert "".join(parts) == undisturbed.choices[0].text

    play(folder, scene)


def test_an_engine_that_missed_an_abort_accepts_the_next_attempt(folder: Path) -> None:
    """The engine still runs the first attempt, whose outputs arrive late. The answer has every
    token once."""

    async def scene(cluster: FakeCluster) -> None:
        engine = await cluster.join(0, steps=3)
        stream = Stream(cluster, body([1], 20))
        await stream.has(3)
        before = dict(engine.requests)
        engine.deaf_to_aborts = True
        engine.lose(1)
        engine.allow(1)
        await until(lambda: len(engine.arrived) == 2)
        first, second = engine.arrived
        assert (first.request_id, first.attempt) == (second.request_id, second.attempt - 1)
        assert engine.aborted == [first.request_id] and len(engine.requests) == 1

        def late() -> None:
            for request_id, (peer, _request, _tokens) in before.items():
                wrong = [
                    EngineCoreOutput(request_id, [99], None),
                    EngineCoreOutput(request_id, [], FinishReason.ABORT),
                ]
                engine._send(peer, wrong)

        engine.call(late)
        engine.allow()
        assert (await stream.done).ids == truth([1], 20)
        assert len(engine.arrived) == 2

    play(folder, scene)
