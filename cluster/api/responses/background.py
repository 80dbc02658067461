"""Responses that one ingress computes while nobody waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Coroutine

from swell.cluster.api.http_errors import HTTPError
from swell.cluster.api.responses.response_store import (
    HEARTBEAT_S,
    IDLE_HEARTBEAT_S,
    Begin,
    Job,
    StoredResponse,
)
from swell.cluster.api.responses.store_client import (
    ResponseStoreClient,
    StoreUnavailable,
    response_id_of,
)
from swell.configs.log import StructuredLogger

Work = Coroutine[None, None, None]

_MAX_TAKEOVERS = 8
"""Responses that an ingress takes over with one heartbeat."""


class BackgroundRunner:
    """Reports to the store what runs here, and stops what it answers (`response_store.py`): one
    call a heartbeat, however many run, and seldom one while nothing does. If this ingress ends,
    another one computes what ran here, to the same answer: `resume` makes the work of what is taken
    over, by an ingress that `is_ready` for it."""

    def __init__(
        self,
        store: ResponseStoreClient,
        resume: Callable[[Begin], Work],
        is_ready: Callable[[], bool],
    ) -> None:
        self._store = store
        self._resume = resume
        self._is_ready = is_ready
        self._runner = uuid.uuid4().hex
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, Begin] = {}
        self._wake = asyncio.Event()
        self._heartbeat_task: asyncio.Task[None] | None = None
        self._log = StructuredLogger("cluster.ingress")

    def start(self) -> None:
        self._heartbeat_task = asyncio.create_task(self._heartbeat_loop())

    async def begin(self, key: str, kept: StoredResponse, job: Job, work: Work) -> None:
        """Run `work`, which stores the response at its end. HTTPError if it cannot be stored."""
        begin = Begin(key, kept, self._runner, job)
        try:
            if not await self._store.begin(begin):
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
        self._run(begin, work)

    async def store(self, key: str, kept: StoredResponse) -> bool:
        """Store the end of a response, however long the store is away: it can be had nowhere else.
        False as of `ResponseStoreClient.store`."""
        while True:
            try:
                return await self._store.store(key, kept, self._runner)
            except StoreUnavailable:
                await asyncio.sleep(HEARTBEAT_S)

    async def close(self) -> None:
        """End what runs here; other ingresses may take it at once."""
        tasks = [*self._tasks.values(), *([self._heartbeat_task] if self._heartbeat_task else ())]
        ran = bool(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if ran:
            with contextlib.suppress(StoreUnavailable):
                await self._store.leave(self._runner)

    def _run(self, begin: Begin, work: Work) -> None:
        self._running[begin.id] = begin
        self._tasks[begin.id] = asyncio.create_task(self._finish(begin.id, work))
        self._wake.set()

    async def _finish(self, key: str, work: Work) -> None:
        try:
            await work
        except Exception as error:  # no heartbeat names it any more: it is taken over
            self._log.exception("background", error)
        finally:
            del self._tasks[key], self._running[key]

    async def _heartbeat_loop(self) -> None:
        while True:
            self._wake.clear()
            if not self._tasks:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_HEARTBEAT_S):  # `wait_for` may swallow `close`
                        await self._wake.wait()
            if self._tasks:
                await asyncio.sleep(HEARTBEAT_S)
            try:
                await self._send_heartbeat()
            except StoreUnavailable:
                continue
            except Exception as error:  # the next heartbeat may succeed
                self._log.exception("heartbeat", error)

    async def _send_heartbeat(self) -> None:
        takes = _MAX_TAKEOVERS if self._is_ready() else 0
        orders = await self._store.heartbeat(self._runner, list(self._tasks), takes)
        for key in orders.stop:
            if key in self._tasks:
                self._tasks[key].cancel()
        for begin in orders.taken:
            if begin.id not in self._tasks:  # else it is just being stopped, and is given again
                id = response_id_of(begin.id)  # the log holds no API keys
                self._log.warning("taken over", id=id, lost_runners=begin.lost_runners)
                self._run(begin, self._resume(begin))
        for key in orders.unknown:
            if key in self._running:
                await self._store.begin(self._running[key])
