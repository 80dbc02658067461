"""A cluster with several ingresses, and streams from it that the client cuts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from swell.cluster.api.ingress import Ingress
from tests.cluster.api.responses.responses_server import CALL, LOOK, TOKENIZER, FakeResponseStore
from tests.cluster.fake_cluster import (
    UNLIMITED_STEPS,
    FakeCluster,
    FakeEngine,
    until,
)
from tests.support.deadlines import HANG_S

KEY, LAST = "idempotency-key", "last-event-id"
HELLO = [{"role": "user", "content": "hi"}]
CALLED = f"it is 🎉 there{CALL}"
"""An answer with a tool call and content in which one character has several tokens."""
_ANTHROPIC_LOOK = {"name": "look", "input_schema": {"type": "object", "properties": {}}}
_CHAT_LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}

COMPLETION = (
    "/v1/completions",
    {
        "prompt": [1, 2, 3],
        "max_tokens": 9,
        "logprobs": 1,
        "return_token_ids": True,
        "ignore_eos": True,
    },
)
"""Path and body of the simplest request."""
REQUESTS: dict[str, tuple[str, dict[str, Any], str | None]] = {
    # Name -> path, body, text of the answer. None: the tokens depend on the seed.
    "completion": (*COMPLETION, None),
    "completions": (
        "/v1/completions",
        {
            "prompt": [[1, 2], [3, 4, 5]],
            "n": 2,
            "max_tokens": 5,
            "echo": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
        None,
    ),
    "stop string": (
        "/v1/completions",
        {"prompt": "a", "stop": ["lazy dog"]},
        "fox; lazy cat; lazy dog",
    ),
    "interval": (
        "/v1/completions",
        {"prompt": [7], "max_tokens": 12, "stream_interval": 3, "ignore_eos": True},
        None,
    ),
    "chat": (
        "/v1/chat/completions",
        {
            "messages": HELLO,
            "n": 3,
            "logprobs": True,
            "top_logprobs": 2,
            "max_tokens": 6,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
        None,
    ),
    "chat call": (
        "/v1/chat/completions",
        {"messages": HELLO, "tools": [_CHAT_LOOK], "n": 2, "return_token_ids": True},
        CALLED,
    ),
    "response": (
        "/v1/responses",
        {"input": "hi", "include": ["message.output_text.logprobs"], "tools": [LOOK]},
        CALLED,
    ),
    "message": (
        "/v1/messages",
        {"messages": HELLO, "max_tokens": 200, "tools": [_ANTHROPIC_LOOK]},
        CALLED,
    ),
}


class ResumableServer:
    """`async with ResumableServer(folder) as server`: one engine, and any number of ingresses."""

    def __init__(
        self,
        folder: Path,
        text: str | None = None,
        *,
        steps: int = UNLIMITED_STEPS,
        **settings: object,
    ) -> None:
        """Starts the engine with credit for `steps` steps."""
        TOKENIZER.save_pretrained(folder)
        tokens = None
        if text is not None:
            tokens = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]
        self.store = FakeResponseStore()
        self.cluster = FakeCluster(folder, tokens, **{"serve.tool_parser": "hermes", **settings})
        self.cluster.store = self.store.store_handle()
        self._steps = steps
        self.engine: FakeEngine
        self.first: Client
        self._open = contextlib.AsyncExitStack()

    async def __aenter__(self) -> ResumableServer:
        cluster = await self._open.enter_async_context(self.cluster.serving())
        self.first = Client(cluster.client, cluster.ingress)
        self.engine = await cluster.join(0, self._steps)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def another(self) -> Client:
        """Starts another ingress, which keeps nothing yet, and returns a client of it."""
        other = self.cluster.another_ingress(self.store.store_handle())
        ingress, url = await self._open.enter_async_context(other)
        client = httpx.AsyncClient(base_url=url, timeout=HANG_S)
        return Client(await self._open.enter_async_context(client), ingress)

    async def is_idle(self) -> None:
        """Waits until no engine has a request."""
        await until(lambda: not self.engine.requests)


class Client:
    """A client of one ingress."""

    def __init__(self, http: httpx.AsyncClient, ingress: Ingress) -> None:
        self.http = http
        self.ingress = ingress

    @property
    def kept(self) -> int:
        """The number of answers that its ingress keeps."""
        return len(self.ingress.services.resumable._table)

    @property
    def kept_bytes(self) -> int:
        return self.ingress.services.resumable._table.size_bytes

    @property
    def grace_timers(self) -> dict[Any, Any]:
        """The grace timers of the answers that run without a reader."""
        return self.ingress.services.resumable._grace_timers

    async def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post(path, json={"model": "fake", **body}, headers=sent)

    async def stream(self, path: str, body: dict[str, Any], **headers: str) -> list[bytes]:
        answer = await self.post(path, {**body, "stream": True}, **headers)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return events_of(answer.content)

    @contextlib.asynccontextmanager
    async def cut_stream(
        self, path: str, body: dict[str, Any], **headers: str
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yields the events one by one. The connection is closed when the block exits."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        payload = {"model": "fake", **body, "stream": True}
        async with self.http.stream("POST", path, json=payload, headers=sent) as answer:
            assert answer.status_code == 200, await answer.aread()
            yield _events(answer)


async def _events(answer: httpx.Response) -> AsyncIterator[bytes]:
    rest = b""
    async for part in answer.aiter_bytes():
        *whole, rest = (rest + part).split(b"\n\n")
        for event in whole:
            yield event


def events_of(content: bytes) -> list[bytes]:
    """Returns the events without comments and completion times. They must be equal whenever an
    answer is computed again."""
    return [
        re.sub(rb'"completed_at":[0-9]+', b"", event)
        for event in content.split(b"\n\n")
        if event and not event.startswith(b":")
    ]


def id_of(event: bytes) -> str:
    found = re.match(rb"id: (.+)\n", event)
    assert found is not None, event
    return found[1].decode()
