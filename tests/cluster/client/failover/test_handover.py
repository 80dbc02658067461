"""Engines that compute prompts for others (prefill-decode separation): where a request goes, and
that no loss changes an answer. The engine's token is a hash of the whole context."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from swell.cluster.client.requests.handover import MAX_PREFILLS, Handover
from swell.cluster.client.routing.routable_engines import Role
from swell.coordinator import roster as rosters
from swell.engine.wire import EngineCoreRequest
from swell.worker.sampler_wire import PoolingParams, SamplerParams
from tests.cluster.fake_cluster import FakeCluster, body, truth, until
from tests.cluster.store_handle import StoreOfTest
from tests.cluster.text import tokenizers_for_tests
from tests.support.deadlines import HANG_S

LONG = [*range(1, 40)]
"""Prompt token ids. Blocks have 4 tokens, so 36 of the ids fill the blocks before the last
token."""
SHORT = [5, 6, 7]
COMPLETIONS = "/v1/completions"


def cluster(folder: Path, prefill_engines: int = 1, **settings: Any) -> FakeCluster:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(folder)
    split = {
        "parallel.prefill_engines": prefill_engines,
        "parallel.prefill_min_tokens": 16,
        "cache.handover_folder": str(folder),
    }
    return FakeCluster(folder, **{**split, **settings})


async def ids_of(found: FakeCluster, asked: dict[str, Any]) -> list[int]:
    answer = await found.client.post(COMPLETIONS, json={**asked, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def test_one_engine_computes_the_prompt_and_another_one_continues(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path).serving() as found:
            prefill, decode = [await found.join(rank) for rank in (0, 1)]
            answer = await found.client.post(COMPLETIONS, json=body(LONG, 6, return_token_ids=True))
            assert answer.json()["choices"][0]["token_ids"] == truth(LONG, 6)
            assert answer.headers["x-swell-engine"] == "0,1"
            (first,), (second,) = prefill.arrived, decode.arrived
            assert first.prompt_token_ids == LONG[:36] and first.max_tokens == 1
            assert second.prompt_token_ids == LONG and second.attempt == 2
            assert first.hand_over == second.handed_over != ""
            assert not first.handed_over and not second.hand_over
            assert await found.metric("swell_resubmitted_requests_total") == 0

    asyncio.run(test())


def test_short_or_cached_prompts_are_computed_by_the_decode_engine(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path).serving() as found:
            prefill, decode = [await found.join(rank) for rank in (0, 1)]
            assert await ids_of(found, body(SHORT, 4)) == truth(SHORT, 4)
            assert not prefill.arrived and len(decode.arrived) == 1
            first = await ids_of(found, body(LONG, 4))
            assert len(prefill.arrived) == 1
            longer = [*LONG, *first, *SHORT]
            assert await ids_of(found, body(longer, 4)) == truth(longer, 4)
            assert len(prefill.arrived) == 1, "the second turn lacks little"

    asyncio.run(test())


@pytest.mark.parametrize("ranks", [[0], [1, 2]], ids=["none continues", "none computes prompts"])
def test_engines_do_both_if_the_other_role_has_no_engines(tmp_path: Path, ranks: list[int]) -> None:
    async def test() -> None:
        async with cluster(tmp_path).serving() as found:
            engines = [await found.join(rank) for rank in ranks]
            assert await ids_of(found, body(LONG, 5)) == truth(LONG, 5)
            assert sum(len(engine.arrived) for engine in engines) == 1

    asyncio.run(test())


@pytest.mark.parametrize("others", [0, 1])
def test_the_loss_of_the_prefill_engine_is_recovered(tmp_path: Path, others: int) -> None:
    async def test() -> None:
        async with cluster(tmp_path, 1 + others).serving() as found:
            lost = await found.join(0, 0)
            running = asyncio.create_task(ids_of(found, body(LONG, 5)))
            await found.join(2)
            await until(lambda: lost.requests)
            for rank in range(1, 1 + others):
                await found.join(rank)
            await found.kill(lost)
            assert await running == truth(LONG, 5)

    asyncio.run(test())


def test_the_loss_of_the_decode_engine_is_recovered(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path).serving() as found:
            await found.join(0)
            lost = await found.join(1, 0)
            running = asyncio.create_task(ids_of(found, body(LONG, 9)))
            await until(lambda: lost.requests)
            lost.allow(3)
            await until(lambda: any(len(tokens) == 3 for *_, tokens in lost.requests.values()))
            heir = await found.join(2)
            await found.kill(lost)
            assert await running == truth(LONG, 9)
            (core,) = heir.arrived
            assert core.output_token_ids == truth(LONG, 3)
            assert not core.handed_over, "it was read, and is there no more"
            assert await found.metric("swell_resubmitted_requests_total") == 1

    asyncio.run(test())


def test_a_disconnect_during_prefill_leaves_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path).serving() as found:
            prefill, decode = await found.join(0, 0), await found.join(1)
            asked = body(LONG, 5, stream=True)
            running = asyncio.create_task(found.client.post(COMPLETIONS, json=asked))
            await until(lambda: prefill.requests)
            running.cancel()
            await until(lambda: prefill.aborted)
            assert not decode.arrived

    asyncio.run(test())


def test_an_error_of_the_prefill_fails_the_request(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path).serving() as found:
            prefill, _decode = await found.join(0, 0), await found.join(1)
            running = asyncio.create_task(found.client.post(COMPLETIONS, json=body(LONG, 5)))
            await until(lambda: prefill.requests)
            prefill.fail("it cannot be computed")
            answer = await running
            assert answer.status_code == 500 and "it cannot be computed" in answer.text

    asyncio.run(test())


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 1}, {"data_parallel_rank": 1}], ids=["prompt_logprobs", "pinned"]
)
def test_requests_that_need_one_engine_are_not_split(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    async def test() -> None:
        async with cluster(tmp_path).serving() as found:
            prefill, _decode = [await found.join(rank) for rank in (0, 1)]
            assert await ids_of(found, body(LONG, 5, **fields)) == truth(LONG, 5)
            assert all(not core.hand_over for core in prefill.arrived)

    asyncio.run(test())


def test_many_concurrent_requests_with_several_answers(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, 2).serving() as found:
            for rank in range(4):
                await found.join(rank)
            prompts = [[first, *LONG] for first in range(50, 70)]
            asked = [body(prompt, 5, n=2, return_token_ids=True) for prompt in prompts]
            answers = await asyncio.gather(
                *(found.client.post(COMPLETIONS, json=each) for each in asked)
            )
            for prompt, answer in zip(prompts, answers, strict=True):
                choices = answer.json()["choices"]
                assert [choice["token_ids"] for choice in choices] == [
                    truth(prompt, 5, seed) for seed in (3, 4)
                ]
            for engine in found.engines[:2]:
                assert engine.arrived and all(core.hand_over for core in engine.arrived)
            for engine in found.engines[2:]:
                assert all(core.handed_over for core in engine.arrived)

    asyncio.run(test())


# ------------------------------------------------------------------------------- pure decisions


def request(**fields: Any) -> EngineCoreRequest:
    sampler = fields.pop("sampler", SamplerParams())
    return EngineCoreRequest("a", LONG, sampler, 4, **fields)


def test_an_engine_of_another_version_reads_no_blocks() -> None:
    for version in ("one", "two"):
        handover = Handover(request())
        handover.begin(4, "one")
        handover.assign("one")
        handover.end()
        handover.assign(version)
        assert bool(handover.engine_request(request()).handed_over) == (version == "one")


def test_the_number_of_remote_prefills_is_bounded() -> None:
    handover, names = Handover(request()), set()
    while handover.may_begin:
        handover.begin(4, "one")
        assert handover.role is Role.PREFILL and not handover.may_begin
        names.add(handover.engine_request(request()).hand_over)
        handover.fail()
        assert handover.role is Role.DECODE
    assert len(names) == MAX_PREFILLS, "no attempt finds the files of another"


@pytest.mark.parametrize(
    "fields",
    [
        {"skip_prefix_cache": True},
        {"sampler": SamplerParams(pooling=PoolingParams())},
        {"sampler": SamplerParams(routed_experts=True)},
    ],
)
def test_answers_with_prompt_data_are_not_split(fields: dict[str, Any]) -> None:
    assert not Handover(request(**fields)).may_begin


def test_engines_of_one_version_hand_over(tmp_path: Path) -> None:
    """This holds while an upgrade replaces engines one by one."""

    async def test() -> None:
        async with cluster(tmp_path).serving() as found:
            engines = [found.start(rank) for rank in range(3)]
            versions = ("new", "old", "new")
            members = [
                replace(engine.member, version=version)
                for engine, version in zip(engines, versions, strict=True)
            ]
            await found.change(lambda now: rosters.join(now, members))
            for first in range(50, 56):
                prompt = [first, *LONG]
                assert await ids_of(found, body(prompt, 4)) == truth(prompt, 4)
            assert len(engines[0].arrived) == len(engines[2].arrived) == 6
            assert not engines[1].arrived
            assert all(core.handed_over for core in engines[2].arrived)

    asyncio.run(test())


def test_engines_of_different_versions_do_not_hand_over(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path).serving() as found:
            engines = [found.start(rank) for rank in range(2)]
            members = [
                replace(engine.member, version=f"v{rank}") for rank, engine in enumerate(engines)
            ]
            await found.change(lambda now: rosters.join(now, members))
            assert await ids_of(found, body(LONG, 4)) == truth(LONG, 4)
            assert not any(core.hand_over for engine in engines for core in engine.arrived)

    asyncio.run(test())


def test_a_session_is_not_prefilled_for_an_engine_that_holds_it(tmp_path: Path) -> None:
    """Another ingress knows only from the session which engine has its blocks."""
    store = StoreOfTest()

    async def test() -> None:
        split = cluster(tmp_path)
        split.store = store.new_handle()
        async with split.serving() as found:
            prefill, _decode = [await found.join(rank) for rank in (0, 1)]
            id = (await found.client.post("/v1/sessions", json={})).json()["id"]
            first = await ids_of(found, body(LONG, 4, session_id=id))
            assert len(prefill.arrived) == 1
            other = found.another_ingress(store.new_handle())
            async with (
                other as (_, url),
                httpx.AsyncClient(base_url=url, timeout=HANG_S) as client,
            ):
                asked = body(SHORT, 4, session_id=id, return_token_ids=True)
                answer = (await client.post(COMPLETIONS, json=asked)).json()
                whole = [*LONG, *first, *SHORT]
                assert answer["choices"][0]["token_ids"] == truth(whole, 4)
            assert len(prefill.arrived) == 1

    asyncio.run(test())
