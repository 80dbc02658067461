"""Answers that outlive the connections of their readers.

A request with an `Idempotency-Key` names its answer by key, caller, path and body. While an ingress
has the answer, every such request that reaches it reads the answer there, from its beginning or
after the event that `Last-Event-ID` names. Any other ingress computes the answer again. Both
produce the same events, because the events depend only on the request, the version of the weights
and the adapter: the seed and all ids derive from the name, the outputs of the engines are read
token by token and choice by choice, and everything else (time, version, adapter) is in the id of
each event. Therefore nothing is stored elsewhere, and the process that began an answer may have
terminated.

An answer that no client reads runs for `serve.resume_grace_s`, then it is aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Set
from contextlib import ExitStack
from random import Random
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from swell.cluster.api.answers.answer_identity import AnswerIdentity, new_identity
from swell.cluster.api.answers.disconnect import with_deadline
from swell.cluster.api.answers.event_stream import EventStreamResponse
from swell.cluster.api.answers.response_writer import ENGINES, VERSION
from swell.cluster.api.bodies.http_errors import HTTPError
from swell.cluster.api.endpoints import json_response
from swell.cluster.api.request_context import RequestContext, context_of
from swell.cluster.api.resumable.event_id import LAST_EVENT_ID, EventId
from swell.cluster.api.resumable.generation import Generation, GenerationState
from swell.cluster.api.resumable.generation_table import GenerationTable
from swell.cluster.api.resumable.resumable_request import (
    IDEMPOTENCY_KEY,
    answer_name,
    check_same_answer,
    read_headers,
    seed_of,
)
from swell.cluster.api.store.bounded_table import table_key
from swell.cluster.client.requests.request_state import EngineGone
from swell.cluster.text.errors import BadRequest, bad_value
from swell.cluster.text.prompt.thread_offload import OffloadPool
from swell.configs.error_text import shown
from swell.configs.lora import Adapter
from swell.configs.serve import ResumableLimits

BeginAnswer = Callable[[RequestContext, AnswerIdentity], Awaitable[Response]]
"""Starts an answer and returns its response."""

KEPT = (ENGINES, VERSION)
"""Headers of the answer that all of its readers receive."""
REPLAYED = "idempotent-replayed"
"""The header of an answer that an earlier request began."""


class ResumableAnswers:
    """The resumable answers of one ingress. `versions` returns the versions of the serving engines;
    `adapter_of` finds the adapter that a request names; `count` counts results (`RESUMABLE_RESULTS`
    of the metrics)."""

    def __init__(
        self,
        limits: ResumableLimits,
        offload: OffloadPool,
        versions: Callable[[], Set[str]],
        adapter_of: Callable[[str | None], Adapter | None],
        count: Callable[[str], None],
    ) -> None:
        self._limits = limits
        self._offload = offload
        self._versions = versions
        self._adapter_of = adapter_of
        self._count = count
        self._table = GenerationTable(limits)
        self._tasks: dict[Generation, asyncio.Task[None]] = {}
        self._grace_timers: dict[Generation, asyncio.TimerHandle] = {}

    async def close(self) -> None:
        for timer in self._grace_timers.values():
            timer.cancel()
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def has(self, request: Request, owner: str) -> bool:
        """Returns whether this ingress keeps an answer for the request's key, so that the request
        needs no engine."""
        sent = request.headers.get(IDEMPOTENCY_KEY)
        return sent is not None and self._table.find(table_key(owner, sent), _now_s()) is not None

    async def answer(self, request: Request, body: Any, begin: BeginAnswer) -> Response:
        """Returns the response to an authorized request, whose body was checked."""
        context, sent = context_of(request), read_headers(request)
        if sent is None:
            return await begin(context, new_identity(context))
        owner = context.owner
        self._check_possible(body, sent.last_event)
        name = await self._offload.run_sized(
            context.body_bytes, answer_name, owner, context.path, sent.key, body
        )
        key = table_key(owner, sent.key)
        found = self._table.find(key, _now_s())
        check_same_answer(sent, name, None if found is None else found.name)
        last = sent.last_event
        with ExitStack() as reading:
            if found is not None:
                self._join(found, reading)
                await with_deadline(context, found.begun())
                if found.continues(last):
                    self._count("joined")
                    return await self._read(context, found, body, last, reading, {REPLAYED: "true"})
                reading.close()
            adapter = self._adapter_of(body.model)
            digest = "" if adapter is None else adapter.digest
            if last is not None:
                self._check_origin(last, digest)
            generation = Generation(key, name, digest)
            new = self._begin(context, generation, _identity(name, adapter, last), begin)
            self._count("begun" if last is None else "recomputed")
            self._join(new, reading)
            await with_deadline(context, new.begun())
            return await self._read(context, new, body, last, reading)

    def _check_possible(self, body: Any, last: EventId | None) -> None:
        if not self._limits.resumable_answers:
            raise BadRequest(
                "this server has no resumable answers (serve.resumable_answers=0); leave out the "
                f"header {IDEMPOTENCY_KEY}",
                IDEMPOTENCY_KEY,
                "unsupported_value",
            )
        if last is not None and not body.stream:
            raise BadRequest(
                f"{LAST_EVENT_ID} is only allowed with stream=true: an answer that is not streamed "
                "has no events",
                LAST_EVENT_ID,
            )

    async def _read(
        self,
        context: RequestContext,
        generation: Generation,
        body: Any,
        last: EventId | None,
        reading: ExitStack,
        headers: Mapping[str, str] = {},
    ) -> Response:
        """Returns the response, made of the kept part of an answer and the part still to come."""
        headers = {**generation.headers, **headers}
        if not body.stream:
            return json_response(await with_deadline(context, generation.whole()), headers=headers)
        number = 0 if last is None else last.number
        await with_deadline(context, generation.reached(number))
        if generation.count < number:
            problem = f"is above the number of events in the answer, {generation.count}"
            raise bad_value(LAST_EVENT_ID, number, problem, "invalid_event_id")
        events = generation.events_after(number)
        return EventStreamResponse(events, headers, on_end=reading.pop_all().close)

    # ---------------------------------------------------------------- readers

    def _join(self, generation: Generation, reading: ExitStack) -> None:
        """Adds a reader, until `reading` is closed."""
        generation.join()
        if (timer := self._grace_timers.pop(generation, None)) is not None:
            timer.cancel()
        reading.callback(self._leave, generation)

    def _leave(self, generation: Generation) -> None:
        generation.leave()
        task = self._tasks.get(generation)
        if generation.readers:
            return
        if task is None:
            self._forget_expired()
            return
        if not self._table.holds(generation):  # no request can find it any more
            task.cancel()
            return
        self._grace_timers[generation] = asyncio.get_running_loop().call_later(
            self._limits.resume_grace_s, self._abandon, generation, task
        )

    def _abandon(self, generation: Generation, task: asyncio.Task[None]) -> None:
        """Aborts an answer to which no client has come back. A request that arrives during the
        abort starts a new answer."""
        self._table.remove(generation)
        task.cancel()

    # ---------------------------------------------------------------- an answer

    def _check_origin(self, last: EventId, adapter: str) -> None:
        """Raises HTTPError if an answer that began elsewhere cannot be computed again."""
        version = last.origin.version
        gone = f"so it cannot be continued; leave out {LAST_EVENT_ID} to get a whole answer"
        if version and version not in self._versions():
            raise HTTPError(
                409,
                f"the answer was started by version {shown(version)} of the weights, which no "
                f"engine has any longer, {gone} from the current version",
                "version_gone",
            )
        if last.origin.adapter != adapter:
            raise HTTPError(
                409,
                "the answer was started with an adapter that has been unloaded or replaced since, "
                f"{gone} from the current adapter",
                "adapter_gone",
            )

    def _begin(
        self,
        context: RequestContext,
        generation: Generation,
        identity: AnswerIdentity,
        begin: BeginAnswer,
    ) -> Generation:
        """Starts to compute an answer from its beginning. Raises HTTPError."""
        before = self._table.find(generation.key, _now_s())
        self._table.add(generation, _now_s())
        if before is not None and not before.readers and before in self._tasks:
            self._tasks[before].cancel()
        work = self._compute(generation, identity.created, begin(context.detached(), identity))
        self._tasks[generation] = asyncio.create_task(work)
        return generation

    async def _compute(
        self, generation: Generation, created: int, beginning: Awaitable[Response]
    ) -> None:
        try:
            response = await beginning
            kept = {name: response.headers[name] for name in KEPT if name in response.headers}
            generation.begin(created, kept.get(VERSION, ""), kept)
            if isinstance(response, EventStreamResponse):
                await self._take_events(generation, response)
            else:
                generation.end_with(bytes(response.body))
                self._table.grew(generation)
        except asyncio.CancelledError:
            self._count("aborted")
            generation.fail(EngineGone("the answer was aborted, because no client was reading it"))
        except Exception as error:
            generation.fail(error)
        finally:
            self._on_end(generation)

    async def _take_events(self, generation: Generation, response: EventStreamResponse) -> None:
        async with response.opened() as events:
            async for chunk in events:
                failed = response.has_failed()
                generation.add_events(chunk, numbered=not failed)
                self._table.grew(generation)
        generation.end(GenerationState.FAILED if response.has_failed() else GenerationState.DONE)

    def _forget_expired(self) -> None:
        self._table.expire(_now_s())

    def _on_end(self, generation: Generation) -> None:
        del self._tasks[generation]
        if (timer := self._grace_timers.pop(generation, None)) is not None:
            timer.cancel()
        if generation.state is GenerationState.DONE:
            self._table.ended(generation, _now_s())
            age_s = self._limits.resumable_age_s
            asyncio.get_running_loop().call_later(age_s, self._forget_expired)
        else:
            self._table.remove(generation)


def _identity(name: str, adapter: Adapter | None, last: EventId | None) -> AnswerIdentity:
    """Returns the identity of an answer. `last` is an event of the same answer that another ingress
    began."""
    return AnswerIdentity(
        id=name,
        created=int(time.time()) if last is None else last.origin.created,
        random=Random(name),
        seed=seed_of(name),
        is_repeatable=True,
        adapter=adapter,
        begun_version=None if last is None else last.origin.version or None,
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
