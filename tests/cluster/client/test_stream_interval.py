"""`stream_interval` over HTTP, set by the server and by a request."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.cluster.fake_cluster import FakeCluster, Stream, body, truth
from tests.cluster.text import tokenizers_for_tests


@pytest.mark.parametrize(("server", "asked", "events"), [(1, None, 9), (4, None, 3), (1, 8, 2)])
def test_a_stream_has_the_number_of_events_of_its_interval(
    tmp_path: Path, server: int, asked: int | None, events: int
) -> None:
    tokenizers_for_tests.chat_tokenizer().save_pretrained(tmp_path)
    interval = max(server, asked or 1)

    async def run() -> None:
        async with FakeCluster(tmp_path, **{"serve.stream_interval": server}).serving() as cluster:
            engine = await cluster.join(0, steps=0)
            more = {} if asked is None else {"stream_interval": asked}
            stream = Stream(cluster, body([1], 9, **more))
            for count in range(1, 10):
                engine.allow(1)
                await stream.has(1 + (count - 1) // interval * interval)
            await stream.done
            assert stream.ids == truth([1], 9)
            assert stream.num_events == events
            for wrong in (0, 2**31):
                answer = await cluster.client.post(
                    "/v1/completions", json=body([1], 9, stream_interval=wrong)
                )
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == "stream_interval"

    asyncio.run(run())
