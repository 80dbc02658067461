"""Requests with many answers: how many are allowed. Either all of them begin or none."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from swell.cluster.text.errors import BadRequest
from swell.cluster.text.params.sampling_params import SamplingParams, internal_request_id
from swell.cluster.text.params.validate_params import check_num_children
from swell.cluster.text.prompt import input_processor
from tests.cluster.fake_cluster import FakeCluster, body, truth, until
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("prompts", "params", "field"),
    [
        (1024, SamplingParams(n=128), "n"),
        (9, SamplingParams(n=128), "n"),
        (1024, SamplingParams(n=1, best_of=2), "best_of"),
        (1025, SamplingParams(), "prompt"),
    ],
)
def test_the_product_of_prompts_and_answers_is_limited(
    prompts: int, params: SamplingParams, field: str
) -> None:
    with pytest.raises(BadRequest) as refused:
        check_num_children(prompts, params, 1024)
    assert refused.value.param == field
    assert "serve.max_children=1024" in refused.value.message


@pytest.mark.parametrize(
    ("prompts", "params"), [(1024, SamplingParams()), (8, SamplingParams(n=100, best_of=128))]
)
def test_products_up_to_the_limit_are_accepted(prompts: int, params: SamplingParams) -> None:
    check_num_children(prompts, params, 1024)


def test_ids_do_not_collide() -> None:
    """With 32-bit ids, 9 of 10 requests with 131 072 answers would have two equal ids."""
    ids = {internal_request_id("x") for _ in range(200_000)}
    assert len(ids) == 200_000
    assert all(len(id.rpartition("-")[2]) == 16 for id in ids)


def test_too_many_answers_start_no_request(folder: Path) -> None:
    async def scenario() -> None:
        async with FakeCluster(folder, **{"serve.max_children": 16}).serving() as cluster:
            engine = await cluster.join(0)
            payload: dict[str, Any] = {**body([1, 2], 2), "prompt": [[1, 2]] * 4, "n": 5}
            refused = await cluster.client.post("/v1/completions", json=payload)
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert error["param"] == "n" and "serve.max_children=16" in error["message"]
            chat = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "n": 17}
            refused = await cluster.client.post("/v1/chat/completions", json=chat)
            assert refused.json()["error"]["param"] == "n"
            assert engine.arrived == []
            answer = await cluster.client.post("/v1/completions", json={**payload, "n": 4})
            assert len(answer.json()["choices"]) == 16

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_between_answers_leaves_none_running(folder: Path, stream: bool) -> None:
    async def scenario() -> None:
        async with FakeCluster(folder).serving() as cluster:
            engine = await cluster.join(0, steps=0)
            llm = cluster.ingress.llm
            submit, begun = llm.submit, 0

            def fails_at_the_70th(*args: Any, **kwargs: Any) -> Any:
                nonlocal begun
                begun += 1
                if begun == 70:
                    raise RuntimeError("no more")
                return submit(*args, **kwargs)

            llm.submit = fails_at_the_70th  # type: ignore[method-assign]
            payload = {**body([1], 5, stream=stream), "prompt": [[n] for n in range(100)]}
            answer = await cluster.client.post("/v1/completions", json=payload)
            assert answer.status_code == 500
            await until(lambda: len(engine.arrived) == len(engine.aborted) == 69)
            assert engine.requests == {}
            assert llm._processor.request_states == {}
            del llm.submit  # type: ignore[method-assign]
            engine.allow()
            answer = await cluster.client.post("/v1/completions", json=body([7], 3))
            assert answer.json()["choices"][0]["token_ids"] == truth([7], 3)

    asyncio.run(scenario())


def test_a_request_that_cannot_be_placed_leaves_nothing(folder: Path) -> None:
    async def scenario() -> None:
        async with FakeCluster(folder).serving() as cluster:
            await cluster.join(0)
            llm = cluster.ingress.llm

            def broken(*args: Any, **kwargs: Any) -> int:
                raise RuntimeError("no choice")

            llm._placer._router.choose = broken  # type: ignore[method-assign]
            answer = await cluster.client.post("/v1/completions", json=body([1], 2))
            assert answer.status_code == 500
            assert llm._processor.request_states == {}

    asyncio.run(scenario())


def test_a_disconnect_while_answers_start_aborts_them(folder: Path) -> None:
    async def scenario() -> None:
        async with FakeCluster(folder).serving() as cluster:
            engine = await cluster.join(0, steps=0)
            payload = {**body([1], 5), "prompt": [[n % 400] * 500 for n in range(1000)]}
            response = asyncio.create_task(cluster.client.post("/v1/completions", json=payload))
            await until(lambda: engine.arrived)
            response.cancel()
            await until(lambda: not cluster.ingress.llm._processor.request_states)
            await until(lambda: engine.arrived and not engine.requests)

    asyncio.run(scenario())


def test_a_disconnected_or_late_client_leaves_the_queue_of_grammar_checks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar check may take half a second, and one process does all checks."""
    compiled: list[object] = []
    monkeypatch.setattr(input_processor, "compile_grammar", lambda *args: compiled.append(args))

    async def scenario() -> None:
        async with FakeCluster(folder).serving() as cluster:
            await cluster.join(0)
            free = threading.Event()
            grammars = cluster.ingress.services.offloads.grammars
            busy = [asyncio.create_task(grammars.run(free.wait)) for _ in range(2)]
            payload = {**body([1, 2], 2), "structured_outputs": {"choice": ["a", "b"]}}
            try:
                leaves = asyncio.create_task(cluster.client.post("/v1/completions", json=payload))
                await until(lambda: grammars._pool._work_queue.qsize() == 1)
                leaves.cancel()
                headers = {"x-request-timeout-s": "0.05"}
                late = asyncio.create_task(
                    cluster.client.post("/v1/completions", json=payload, headers=headers)
                )
                await asyncio.wait({late}, timeout=5)
                await until(lambda: not cluster.edge._server.server_state.tasks)
            finally:
                free.set()
            await asyncio.gather(*busy)
            assert (await late).status_code == 408
            await grammars.run(len, ())
            assert compiled == []

    asyncio.run(scenario())
