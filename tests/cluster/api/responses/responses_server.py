"""A cluster whose `/v1/responses` is called with OpenAI's client: over HTTP, through an ingress, to
an engine with scripted answers. The response store is in this process. Its clock is moved by the
test."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
from openai.types.responses import Response

from swell.cluster.api.store.response_store import Heartbeat, ResponseRequest, ResponseStore
from tests.cluster.fake_cluster import FakeCluster, FakeEngine
from tests.cluster.text import tokenizers_for_tests
from tests.support.deadlines import HANG_S

TOKENIZER = tokenizers_for_tests.chat_tokenizer()
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'
LOOK = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
}


class FakeResponseStore:
    """A response store that records its requests. While `away` is set, every call fails."""

    def __init__(self) -> None:
        self.limit, self.limit_bytes = 100, 10**7
        self.missed: list[ResponseRequest] = []
        self.requests: list[ResponseRequest] = []
        self.heartbeats = 0
        self.now_s = 0.0
        self.away = False
        self.loses: type[ResponseRequest] | None = None
        """The reply to the next request of this type is lost."""
        self.handle = SimpleNamespace(remote=self._handle)
        self.forget()

    def store_handle(self) -> StoreHandle:
        """Returns the handle for another ingress. Each handle can be `away` separately."""
        return StoreHandle(self)

    def forget(self) -> None:
        """Loses all stored responses, as a restarted store process does."""
        self.store = ResponseStore(self.limit, self.limit_bytes, 1000.0)

    def of(self, kind: type[Any]) -> list[Any]:
        return [request for request in self.requests if isinstance(request, kind)]

    async def _handle(self, request: ResponseRequest) -> Any:
        if self.away:
            self.missed.append(request)
            raise ConnectionError("no store")
        if isinstance(request, Heartbeat):
            self.heartbeats += 1
        if (
            not isinstance(request, Heartbeat) or request.ids
        ):  # skips the heartbeats of an idle ingress
            self.requests.append(request)
        reply = self.store.handle(request, self.now_s)
        if self.loses is not None and isinstance(request, self.loses):
            self.loses = None
            raise ConnectionError("the reply was lost")
        return reply


class StoreHandle:
    """The store handle of one ingress."""

    def __init__(self, response_store: FakeResponseStore) -> None:
        self.away = False
        self.requests: list[ResponseRequest] = []
        self._response_store = response_store
        self.handle = SimpleNamespace(remote=self._handle)

    async def _handle(self, request: ResponseRequest) -> Any:
        if self.away:
            raise ConnectionError("no store")
        self.requests.append(request)
        return await self._response_store._handle(request)


class ResponsesServer:
    """A cluster whose engine answers every request with `text`. If `text` is None, the answer
    depends on the prompt."""

    def __init__(self, folder: Path, text: str | None, **settings: object) -> None:
        TOKENIZER.save_pretrained(folder)
        tokens = None
        if text is not None:
            tokens = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]
        self.response_store = FakeResponseStore()
        self.store_handle = self.response_store.store_handle()
        self.cluster = FakeCluster(folder, tokens, **{"serve.tool_parser": "hermes", **settings})
        self.cluster.store = self.store_handle
        self.engine: FakeEngine
        self.client: openai.AsyncOpenAI

    @contextlib.asynccontextmanager
    async def open(self, steps: int = 10**9) -> AsyncIterator[ResponsesServer]:
        async with self.cluster.serving() as cluster:
            self.engine = await cluster.join(0, steps)
            url = f"{cluster.client.base_url}/v1"
            async with openai.AsyncOpenAI(
                base_url=url, api_key="k", timeout=HANG_S, max_retries=0
            ) as self.client:
                yield self

    @contextlib.asynccontextmanager
    async def second_ingress(self) -> AsyncIterator[tuple[StoreHandle, openai.AsyncOpenAI, Any]]:
        """Starts a second ingress. Yields its store handle, its client, and the ingress."""
        store_handle = self.response_store.store_handle()
        async with self.cluster.another_ingress(store_handle) as (ingress, url):
            client = openai.AsyncOpenAI(
                base_url=f"{url}/v1", api_key="k", timeout=HANG_S, max_retries=0
            )
            async with client:
                yield store_handle, client, ingress

    async def create(self, **request: Any) -> Any:
        return await self.client.responses.create(**{"model": "fake", "input": "hello", **request})

    @property
    def prompts(self) -> list[str]:
        """The prompts that the engine received, one for each request."""
        return [TOKENIZER.decode(one.prompt_token_ids) for one in self.engine.arrived]


def checked(response: Any) -> Any:
    """Checks that the response exactly matches OpenAI's types, and returns it."""
    plain = json.loads(response.model_dump_json(by_alias=True, exclude_unset=True))
    return Response.model_validate(plain, strict=True)


async def wait_until(read: Callable[[], Any], condition: Callable[[Any], bool]) -> Any:
    """Polls `read` until `condition` holds for its result, and returns that result."""
    async with asyncio.timeout(30):
        while not condition(found := await read()):
            await asyncio.sleep(0.005)
    return found
