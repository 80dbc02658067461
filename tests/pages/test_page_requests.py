"""Sends the requests of `curl` in the pages to an ingress, with an engine of the tests."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest

from tests.cluster.fake_cluster import FakeCluster
from tests.cluster.store_handle import StoreOfTest
from tests.cluster.text import tokenizers_for_tests
from tests.pages.blocks import blocks, page_commands
from tests.pages.curl import request_of

pytestmark = pytest.mark.slow

NEED_OTHER_MODELS = {
    "docs/guide/adapters.md": "adapters",
    "docs/guide/pooling.md": "a model that pools",
}
"""The pages whose requests need another server, and what it needs. `test_blocks.py` checks that
their routes exist and that their bodies are JSON."""
WITH_REQUESTS = {
    block.page
    for block in blocks()
    if block.language == "bash" and re.search("^ *curl ", block.code, re.MULTILINE)
}
SESSION = "sess_6f…"
"""The id of the session in the pages."""
EVENT = re.compile(r"[0-9a-f]{32}\.\d+\.[0-9a-f.-]*\.\d+")
"""The id of an event of a stream."""


def responses(folder: Path, page: str) -> list[httpx.Response]:
    """Sends the requests of a page, one after another. The ids in the page are examples: later
    requests have those of earlier answers."""
    tokenizers_for_tests.chat_tokenizer().save_pretrained(folder)

    async def scenario() -> list[httpx.Response]:
        with_store = FakeCluster(folder, **{"model.name": "nano"})
        with_store.store = StoreOfTest().new_handle()
        got: list[httpx.Response] = []
        session = event = ""
        async with with_store.serving() as cluster:
            await cluster.join(0)
            for words in page_commands(page, "http://127.0.0.1:8000"):
                if words[0] != "curl":
                    continue
                filled = [EVENT.sub(event, word).replace(SESSION, session) for word in words[1:]]
                method, path, headers, body = request_of(filled)
                answer = await cluster.client.request(method, path, headers=headers, json=body)
                got.append(answer)
                if answer.text.startswith('{"id":"sess_'):
                    session = answer.json()["id"]
                event = next(iter(EVENT.findall(answer.text)), event)
        return got

    return asyncio.run(scenario())


def test_the_pages_with_requests_are_found() -> None:
    assert {"docs/guide/quickstart.md", "docs/guide/sessions.md", *NEED_OTHER_MODELS} <= (
        WITH_REQUESTS
    )


@pytest.mark.parametrize("page", sorted(WITH_REQUESTS - {*NEED_OTHER_MODELS}))
def test_requests_of_a_page_are_answered(tmp_path: Path, page: str) -> None:
    got = responses(tmp_path, page)
    assert got
    assert [(one.url.path, one.text) for one in got if one.status_code != 200] == []


def test_the_stream_of_the_page_is_resumed(tmp_path: Path) -> None:
    """The second request names the first event of the first one, and gets those after it."""
    first, second = (
        EVENT.findall(one.text) for one in responses(tmp_path, "docs/guide/resumable.md")
    )
    assert len(first) > 1
    assert second == first[1:]
