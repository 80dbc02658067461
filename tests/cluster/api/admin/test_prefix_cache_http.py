"""Requests after `POST /admin/reset_prefix_cache`: no engine has a block for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.fake_cluster import FakeCluster, body, until
from tests.cluster.text import tokenizers_for_tests

pytestmark = pytest.mark.slow

SALTS = (None, "tenant", "1 salt tenant")


def test_each_reset_changes_the_salts_of_later_requests(tmp_path: Path) -> None:
    """Requests of one generation share blocks exactly if they have the same `cache_salt`."""
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)

    async def run() -> None:
        async with FakeCluster(tmp_path).serving() as cluster:
            engine = await cluster.join(0)
            client, llm = cluster.client, cluster.ingress.services.llm
            for generation in range(3):
                cluster.coordinator.publish(cache_generation=generation)
                await until(lambda: llm.view.reports.cache_generation == generation)  # noqa: B023
                for salt in (*SALTS, *SALTS):
                    sent = {**body([9], 2), **({} if salt is None else {"cache_salt": salt})}
                    answer = await client.post("/v1/completions", json=sent)
                    assert answer.status_code == 200, answer.text
            salts = [request.cache_salt for request in engine.arrived]
            assert salts[: len(SALTS)] == [*SALTS], "nothing was reset yet"
            rounds = [salts[i : i + len(SALTS)] for i in range(0, len(salts), len(SALTS))]
            assert all(rounds[i] == rounds[i + 1] for i in (0, 2, 4))
            assert len(set(salts)) == 3 * len(SALTS)

    asyncio.run(run())


def test_operators_reset_the_prefix_cache(tmp_path: Path) -> None:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)

    async def run() -> None:
        async with FakeCluster(tmp_path).serving() as cluster:
            headers, path = {"content-type": "application/json"}, "/admin/reset_prefix_cache"
            assert (await cluster.client.post(path, headers=headers)).status_code == 202
            assert (await cluster.client.post(path + "?x=1", headers=headers)).status_code == 400
            assert cluster.manager.calls == ["reset_prefix_cache"]

    asyncio.run(run())
