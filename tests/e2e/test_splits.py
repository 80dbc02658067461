"""A model that is split over processes gives the answers of transformers; `test_two_ingresses.py`
tests two engines with two workers each."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import openai
import pytest

from tests.e2e.cluster import NANO, Cluster
from tests.e2e.one_engine.test_lifecycle import stream, wait_for_answers
from tests.support.deadlines import HANG_S

pytestmark = pytest.mark.slow

TOKENS = 200


def test_tensor_2_x_pipeline_2_and_a_shutdown_that_finishes_streams(heldout, truth):
    """Stops with SIGTERM, for which Ray has its own handler; `Cluster.stop` sends SIGINT."""
    settings = ("parallel.tensor=2", "parallel.pipeline=2", "cluster.drain_timeout_s=120")
    results: list[list[int]] = []
    with Cluster(NANO, "model.dtype=float32", *settings) as running:
        assert_equal_to_transformers(running, heldout, truth)
        reader = stream(running, TOKENS, results)
        wait_for_answers(results, 1)
        running.process.send_signal(signal.SIGTERM)
        reader.join()
        assert running.process.wait(HANG_S) == 0
    assert [len(ids) for ids in results] == [TOKENS]


def assert_equal_to_transformers(
    cluster: Cluster, heldout: list[dict], truth: Callable[[str, int], tuple[list[int], str]]
) -> None:
    """Asserts that the answers equal those of transformers, that every engine serves some of them,
    and that the cluster has four workers."""
    prompts = [record["messages"][-1]["content"] for record in heldout[64:112]]
    served: set[str] = set()

    async def answer_all() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=cluster.url + "/v1", api_key="none", timeout=HANG_S
        ) as api:

            async def complete(prompt: str) -> str:
                answer = await api.chat.completions.with_raw_response.create(
                    model="nano",
                    messages=[{"role": "user", "content": prompt}],
                    temperature=0,
                    max_tokens=60,
                )
                served.update(answer.headers["x-swell-engine"].split(","))
                return answer.parse().choices[0].message.content or ""

            return await asyncio.gather(*(complete(prompt) for prompt in prompts))

    answers = asyncio.run(answer_all())
    assert answers == [truth(prompt, 60)[1] for prompt in prompts]
    engines = cluster.get("/admin/cluster").json()["engines"]
    assert served == {str(engine["rank"]) for engine in engines}
    ranks = [(w["pipeline"], w["tensor"]) for w in engines[0]["workers"]]
    assert ranks == sorted(ranks), "tensor-parallel ranks are neighbours"
    assert len({w["pid"] for engine in engines for w in engine["workers"]}) == 4
