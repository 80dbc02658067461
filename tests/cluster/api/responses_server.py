"""A cluster whose `/v1/responses` OpenAI's client calls: over HTTP, through an ingress, to an
engine whose answers the test scripts. The store is in this process, with a clock that the test
moves."""

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

from swell.cluster.api.store.response_store import Heartbeat, ResponseStore, StoreRequest
from tests.cluster.fake_cluster import FakeCluster, FakeEngine
from tests.cluster.text import tokenizers_for_tests

TOKENIZER = tokenizers_for_tests.chat_tokenizer()
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": 3}}\n</tool_call>'
LOOK = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}},
}


class FakeResponseStore:
    """The store, which counts its requests; while `away` it answers nothing."""

    def __init__(self) -> None:
        self.limit, self.limit_bytes = 100, 10**7
        self.missed: list[StoreRequest] = []
        self.requests: list[StoreRequest] = []
        self.heartbeats = 0
        self.now_s = 0.0
        self.away = False
        self.handle = SimpleNamespace(remote=self._handle)
        self.handle_session = None  # no test here has sessions
        self.forget()

    def store_handle(self) -> StoreHandle:
        """The handle of another ingress, which may be away by itself."""
        return StoreHandle(self)

    def forget(self) -> None:
        """Lose everything that was stored, as a successor has."""
        self.store = ResponseStore(self.limit, self.limit_bytes, 1000.0)

    def of(self, kind: type[Any]) -> list[Any]:
        return [request for request in self.requests if isinstance(request, kind)]

    async def _handle(self, request: StoreRequest) -> Any:
        if self.away:
            self.missed.append(request)
            raise ConnectionError("no store")
        if isinstance(request, Heartbeat):
            self.heartbeats += 1
        if (
            not isinstance(request, Heartbeat) or request.ids
        ):  # an idle ingress heartbeats in between
            self.requests.append(request)
        return self.store.handle(request, self.now_s)


class StoreHandle:
    """One ingress's handle of the store."""

    def __init__(self, response_store: FakeResponseStore) -> None:
        self.away = False
        self.requests: list[StoreRequest] = []
        self._response_store = response_store
        self.handle = SimpleNamespace(remote=self._handle)
        self.handle_session = None  # no test here has sessions

    async def _handle(self, request: StoreRequest) -> Any:
        if self.away:
            raise ConnectionError("no store")
        self.requests.append(request)
        return await self._response_store._handle(request)


class ResponsesServer:
    """A cluster whose engine answers everything with `text`; None: with a text that depends on the
    prompt."""

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
            async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as self.client:
                yield self

    @contextlib.asynccontextmanager
    async def second_ingress(self) -> AsyncIterator[tuple[StoreHandle, openai.AsyncOpenAI, Any]]:
        """A second ingress: its store_handle to the response_store, its client, and itself."""
        store_handle = self.response_store.store_handle()
        async with self.cluster.another_ingress(store_handle) as (ingress, url):
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)
            async with client:
                yield store_handle, client, ingress

    async def create(self, **request: Any) -> Any:
        return await self.client.responses.create(**{"model": "fake", "input": "hello", **request})

    @property
    def prompts(self) -> list[str]:
        """The prompts that the engine received, one for each request."""
        return [TOKENIZER.decode(one.prompt_token_ids) for one in self.engine.arrived]


def checked(response: Any) -> Any:
    """Check that the response is exactly as OpenAI's types have it, and return it."""
    plain = json.loads(response.model_dump_json(by_alias=True, exclude_unset=True))
    return Response.model_validate(plain, strict=True)


async def wait_until(read: Callable[[], Any], condition: Callable[[Any], bool]) -> Any:
    """Return what `look` returns as soon as `condition` holds for it."""
    async with asyncio.timeout(30):
        while not condition(found := await read()):
            await asyncio.sleep(0.005)
    return found
