"""Computes responses while no client waits for them, and defines what another ingress needs to
compute them if this one terminates."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine

import msgspec
from starlette.datastructures import Headers

from swell.cluster.api.answers.event_stream import EventStreamResponse
from swell.cluster.api.bodies.http_errors import HTTPError
from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.api.request_context import REQUEST_ID, RequestContext, detached_context
from swell.cluster.api.responses.convert import chat_request
from swell.cluster.api.responses.items import Item
from swell.cluster.api.responses.protocol import ResponsesRequest
from swell.cluster.api.responses.response import ResponseBody
from swell.cluster.api.responses.response_client import ResponseStoreClient
from swell.cluster.api.store.bounded_table import TableKey, id_of, owner_of
from swell.cluster.api.store.response_store import (
    HEARTBEAT_S,
    IDLE_HEARTBEAT_S,
    Begin,
    Heartbeat,
    HeartbeatReply,
    Job,
    RunnerExit,
    Store,
    StoredResponse,
)
from swell.cluster.api.store.store_client import ReportLoop, StoreUnavailable
from swell.cluster.text.schema.decode import decode
from swell.configs.lora import Adapter
from swell.configs.runtime.log import StructuredLogger

Work = Coroutine[None, None, None]

ROUTE = "/v1/responses"
_MAX_TAKEOVERS = 8
"""The most responses that an ingress takes over with one heartbeat."""


class BackgroundRunner:
    """Reports running responses to the store, and stops those that the reply names
    (`response_store.py`). It makes one call per heartbeat, however many responses run, and fewer
    calls while none runs. If this ingress terminates, another one that `is_ready` takes its
    responses over and computes the same answers. `resume` returns the work of a response that is
    taken over."""

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
        self._storing: set[str] = set()
        """Responses that are being stored. They are not stopped: the store may have them already
        and its reply may be lost."""
        self._reports = ReportLoop(self._report)
        self._silent_s = 0.0
        self._is_asking = False
        """Whether a heartbeat is in progress: the store may have assigned responses to this
        runner."""
        self._log = StructuredLogger("cluster.ingress")

    def start(self) -> None:
        self._reports.start(HEARTBEAT_S)

    async def begin(
        self, key: TableKey, kept: StoredResponse, job: Job, work: Callable[[], Work]
    ) -> None:
        """Starts `work`, which stores the response when it ends. Raises HTTPError if the response
        cannot be stored."""
        begin = Begin(key, kept, self._runner, job)
        if not await self._store.call(begin):
            raise HTTPError(
                503,
                "there is no room for another background response: the running ones use all of "
                "serve.stored_responses or serve.stored_response_bytes; try again later",
                "store_full",
            )
        self._run(begin, work())

    async def store(self, key: TableKey, kept: StoredResponse) -> bool:
        """Stores a finished response, however long the store is unavailable: no other copy exists.
        Returns False if space is lacking, or the response was cancelled, deleted or taken over
        while it ran."""
        self._storing.add(key)
        try:
            return await self._store.until_answered(Store(key, kept, self._runner)) is True
        finally:
            self._storing.discard(key)

    async def close(self) -> None:
        """Cancels what runs here; other ingresses may take it over at once."""
        tasks = [*self._tasks.values()]
        ran = bool(tasks) or self._is_asking
        await self._reports.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if ran:
            with contextlib.suppress(StoreUnavailable):
                await self._store.call(RunnerExit(self._runner))

    def _run(self, begin: Begin, work: Work) -> None:
        self._running[begin.id] = begin
        self._tasks[begin.id] = asyncio.create_task(self._finish(begin.id, work))

    async def _finish(self, key: TableKey, work: Work) -> None:
        try:
            await work
        except Exception as error:  # no later heartbeat lists it: it is taken over
            self._log.exception("background", error)
        finally:
            del self._tasks[key], self._running[key]

    async def _report(self) -> None:
        self._silent_s += HEARTBEAT_S
        if not self._tasks and self._silent_s < IDLE_HEARTBEAT_S:
            return
        self._silent_s = 0.0
        takes = _MAX_TAKEOVERS if self._is_ready() else 0
        self._is_asking = takes > 0
        orders = await self._store.call(Heartbeat(self._runner, list(self._tasks), takes))
        self._is_asking = False
        if not isinstance(orders, HeartbeatReply):
            return
        for key in orders.stop:
            if key in self._tasks and key not in self._storing:
                self._tasks[key].cancel()
        for begin in orders.taken:
            if begin.id not in self._tasks:  # else it is being stopped, and is reassigned later
                id = id_of(begin.id)  # the log must not contain API keys
                self._log.warning("taken over", id=id, lost_runners=begin.lost_runners)
                self._run(begin, self._resume(begin))
        for key in orders.unknown:
            if key in self._running:
                await self._store.call(self._running[key])


class LiveEvents:
    """The events of a background response, for the client that began it. The work neither waits for
    this client nor stops with it. At most the events of one answer are queued, and they are dropped
    when the client leaves."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[bytes] | None = asyncio.Queue()

    def put(self, events: bytes) -> None:
        if self._waiting is not None:
            self._waiting.put_nowait(events)

    async def pass_on(self, reply: EventStreamResponse) -> None:
        """Runs the work that yields the events, and queues them."""
        async with reply.opened() as events:
            async for event in events:
                self.put(event)

    def end(self) -> None:
        self.put(b"")

    def response(self) -> EventStreamResponse:
        return EventStreamResponse(self._events(), {}, on_end=self._leave)

    async def _events(self) -> AsyncGenerator[bytes]:
        while self._waiting is not None and (events := await self._waiting.get()):
            yield events

    def _leave(self) -> None:
        self._waiting = None


def make_job(context: RequestContext, body: ResponsesRequest, adapter: Adapter | None) -> Job:
    """Returns a small job: unset fields are left out, and so is the input, which is kept as items.
    `stream` is removed, because an ingress that takes over cannot stream to the client."""
    headers = {**context.trace_headers, REQUEST_ID: context.id}
    return Job(
        msgspec.json.encode(
            msgspec.structs.replace(body, input=[], stream=None, stream_options=None)
        ),
        [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
        adapter,
    )


def restore_job(begun: Begin) -> tuple[ResponsesRequest, ResponseBody, ChatCompletionRequest]:
    """Returns a response that another ingress had begun, as typed bodies."""
    body = decode(begun.job.body, ResponsesRequest)
    response = msgspec.json.decode(begun.kept.body, type=ResponseBody)
    return body, response, chat_request(body, (), items_of(begun.kept))


def items_of(kept: StoredResponse) -> list[Item]:
    return msgspec.json.decode(kept.items, type=list[Item])


def job_context(begun: Begin) -> RequestContext:
    """Returns the context of a response that another ingress had begun."""
    return detached_context(Headers(raw=begun.job.headers), ROUTE, owner_of(begun.id))
