"""Every way to split the work over processes gives the same answers."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.cluster import NANO, Cluster

pytestmark = pytest.mark.slow

SPLITS = {
    "tensor 2 x pipeline 2": ["parallel.tensor=2", "parallel.pipeline=2"],
    "data 2, tensor 2, two ingresses": [
        "parallel.data=2",
        "parallel.tensor=2",
        "serve.ingress_replicas=2",
    ],
}


@pytest.fixture(scope="module", params=SPLITS)
def cluster(request) -> Iterator[Cluster]:
    with Cluster(NANO, "model.dtype=float32", *SPLITS[request.param]) as running:
        yield running


def test_answers_equal_transformers(cluster, heldout, truth):
    prompts = [record["messages"][-1]["content"] for record in heldout[64:112]]
    served: set[str] = set()

    async def answer_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=cluster.url + "/v1", api_key="none") as api:

            async def complete(prompt: str) -> str:
                answer = await api.chat.completions.with_raw_response.create(
                    model="nano",
                    messages=[{"role": "user", "content": prompt}],
                    temperature=0,
                    max_tokens=60,
                )
                served.add(answer.headers["x-swell-engine"])
                return answer.parse().choices[0].message.content or ""

            return await asyncio.gather(*(complete(prompt) for prompt in prompts))

    answers = asyncio.run(answer_all())
    assert answers == [truth(prompt, 60)[1] for prompt in prompts]
    engines = cluster.get("/admin/cluster").json()["engines"]
    assert served == {str(engine["rank"]) for engine in engines}
    ranks = [(w["pipeline"], w["tensor"]) for w in engines[0]["workers"]]
    assert ranks == sorted(ranks), "tensor-parallel ranks are neighbours"
    assert len({w["pid"] for engine in engines for w in engine["workers"]}) == 4


def ended(cluster: Cluster) -> set[float]:
    """How many requests have ended, as several polls give it: each time the kernel decides which
    ingress answers."""
    pattern = r"^swell_request_success_total{.*} (\S+)$"
    texts = [cluster.get("/metrics").text for _ in range(12)]
    return {sum(map(float, re.findall(pattern, text, re.MULTILINE))) for text in texts}


def test_any_ingress_counts_all_requests(cluster):
    earlier, counts = set(), ended(cluster)
    while len(counts) > 1 or counts != earlier:  # all has been reported
        time.sleep(3)
        earlier, counts = counts, ended(cluster)
    (before,) = counts
    fields = {"model": "nano", "prompt": "count from 1 to 9", "max_tokens": 8}
    for _ in range(12):
        cluster.post("/v1/completions", fields)
    deadline = time.monotonic() + 60
    while (count := ended(cluster)) != {before + 12}:
        assert time.monotonic() < deadline, f"{count}, and it were {before}"
