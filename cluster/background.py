"""Responses that one ingress computes while nobody waits for them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine

from swell.cluster.http import HTTPError
from swell.cluster.response_store import ResponseStore, StoreAway
from swell.cluster.stored import BEAT_S, Kept
from swell.configs.log import FactLogger


class Background:
    """The store is told what runs here, and tells what is to stop (`cluster/stored.py`): one call a
    beat, however many run, and none while nothing does. If this ingress ends, what runs ends with
    it, and the store calls it lost once its beats are missed."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._runner = uuid.uuid4().hex
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._begun: dict[str, Kept] = {}
        self._beats: asyncio.Task[None] | None = None
        self._log = FactLogger("cluster.ingress")

    async def begin(self, id: str, kept: Kept, work: Coroutine[None, None, None]) -> None:
        """Run `work`, which stores the response at its end. HTTPError if it cannot be stored."""
        try:
            if not await self._store.begin(id, kept, self._runner):
                raise HTTPError(
                    503,
                    "there is no room for another response in the background: what runs fills "
                    "serve.stored_responses or serve.stored_response_bytes; try again later",
                    "store_full",
                    "server_error",
                )
        except BaseException:
            work.close()
            raise
        self._begun[id] = kept
        self._tasks[id] = asyncio.create_task(self._run(id, work))
        if self._beats is None or self._beats.done():
            self._beats = asyncio.create_task(self._beat_while_running())

    async def store(self, id: str, kept: Kept) -> bool:
        """Store the end of a response, however long the store is away: it can be had nowhere else.
        False as of `ResponseStore.store`."""
        while True:
            try:
                return await self._store.store(id, kept)
            except StoreAway:
                await asyncio.sleep(BEAT_S)

    def close(self) -> None:
        for task in (*self._tasks.values(), *([self._beats] if self._beats else ())):
            task.cancel()

    async def _run(self, id: str, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except Exception as error:  # the store will call it lost
            self._log.error("background", error=f"{type(error).__name__}: {error}")
        finally:
            del self._tasks[id], self._begun[id]

    async def _beat_while_running(self) -> None:
        while self._tasks:
            await asyncio.sleep(BEAT_S)
            try:
                orders = await self._store.beat(self._runner, list(self._tasks))
                for id in orders.stop:
                    if id in self._tasks:
                        self._tasks[id].cancel()
                for id in orders.unknown:
                    if id in self._begun:
                        await self._store.begin(id, self._begun[id], self._runner)
            except StoreAway:
                continue
