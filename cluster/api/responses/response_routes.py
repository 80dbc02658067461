"""The routes of `/v1/responses`: new responses, and stored ones."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swell.cluster.api.answers.answer_identity import AnswerIdentity, new_identity
from swell.cluster.api.answers.disconnect import with_deadline
from swell.cluster.api.answers.event_stream import EventStreamResponse
from swell.cluster.api.answers.response_writer import ENGINES, VERSION
from swell.cluster.api.bodies.body_reader import warn_of_keywords
from swell.cluster.api.bodies.http_errors import HTTPError, error_info
from swell.cluster.api.bodies.query import checked_query
from swell.cluster.api.chat.convert import to_generation_request
from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.api.endpoints import json_response, route
from swell.cluster.api.request_context import RequestContext
from swell.cluster.api.responses.background import (
    ROUTE,
    BackgroundRunner,
    LiveEvents,
    items_of,
    job_context,
    make_job,
    restore_job,
)
from swell.cluster.api.responses.convert import chat_request, name_of
from swell.cluster.api.responses.items import ReasoningItem
from swell.cluster.api.responses.protocol import LOGPROBS, ResponsesRequest
from swell.cluster.api.responses.response import (
    ResponseBody,
    ResponseDeleted,
    begin_response,
    item_list,
)
from swell.cluster.api.responses.response_client import ResponseStoreClient
from swell.cluster.api.responses.writer import ResponsesWriter
from swell.cluster.api.services import Services
from swell.cluster.api.store.bounded_table import TableKey, table_key
from swell.cluster.api.store.response_store import (
    Begin,
    Cancel,
    Delete,
    Read,
    StoredLookup,
    StoredResponse,
    StoredStatus,
)
from swell.cluster.text.errors import BadRequest, bad_value
from swell.cluster.text.params import sampling_params
from swell.cluster.text.prompt.input_processor import ProcessedRequest
from swell.configs.runtime.secret import HoldsSecrets, SecretText

_PAGE_ITEMS = 20
_MAX_PAGE_ITEMS = 100
_encode = msgspec.json.encode


class _Answer(HoldsSecrets, frozen=True):
    """A response that this ingress computes."""

    key: TableKey
    """The key of the response in the store."""
    items: bytes
    """The items of the conversation, as JSON."""
    body: ResponsesRequest
    response: ResponseBody

    @property
    def stored(self) -> StoredResponse:
        """The response as the store keeps it, in its current state."""
        return StoredResponse(_encode(self.response), self.items)


class ResponseRoutes:
    """The routes. An answer is stored before its end is sent, so that a client that has seen the
    end can continue it with the same API key, through any ingress."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._config = services.config.serve
        self._store = ResponseStoreClient(services.store)
        self._background = BackgroundRunner(
            self._store, self._resume, lambda: services.llm.has_seen_engine
        )

    def routes(self) -> list[Route]:
        return [
            route(ROUTE, self._create, "POST"),
            route("/v1/responses/{id}", self._retrieve, "GET"),
            route("/v1/responses/{id}", self._delete, "DELETE"),
            route("/v1/responses/{id}/cancel", self._cancel, "POST"),
            route("/v1/responses/{id}/input_items", self._input_items, "GET"),
        ]

    def start(self) -> None:
        if self._config.stored_responses:
            self._background.start()

    async def close(self) -> None:
        await self._background.close()

    # ---------------------------------------------------------------- an answer

    async def _create(self, request: Request) -> Response:
        body = await self._services.read_for_answer(request, ResponsesRequest)
        begin = partial(self._answer, body)
        return await self._services.resumable.answer(request, body, begin)

    async def _answer(
        self, body: ResponsesRequest, context: RequestContext, identity: AnswerIdentity
    ) -> Response:
        model = self._services.model_name(body.model)
        response = begin_response(body, model, store=self._should_store(body))
        if identity.is_repeatable:
            response.id, response.created_at = f"resp_{identity.id}", identity.created
        found = await self._previous_response(context.owner, body.previous_response_id)
        if body.background and body.seed is None:  # another ingress must sample the same tokens
            seed = sampling_params.random_seed() if identity.seed is None else identity.seed
            body = msgspec.structs.replace(body, seed=seed)
        size = context.body_bytes + (0 if found is None else found.kept.size_bytes)
        chat, items = await self._services.offloads.bodies.run_sized(
            size, _conversation, body, found
        )
        params = await with_deadline(context, self._process_chat(context, chat, size, identity))
        warn_of_keywords(context, map(name_of, params.ignored_keywords))
        response.temperature, response.top_p = params.params.temperature, params.params.top_p
        answer = _Answer(table_key(context.owner, response.id), items, body, response)
        writer = self._writer(answer, params, identity)
        if body.background:
            return await self._begin(context, answer, params, writer, identity)
        reply = await self._services.serving.answer(context, params, writer, identity)
        if params.stream:
            return reply
        await writer.commit(reply.headers[ENGINES])
        served = {
            name: value for name, value in reply.headers.items() if name in (ENGINES, VERSION)
        }
        return json_response(response, headers=served)

    def _writer(
        self, answer: _Answer, params: ProcessedRequest, identity: AnswerIdentity
    ) -> ResponsesWriter:
        body = answer.body
        logprobs = body.top_logprobs or 0 if LOGPROBS in (body.include or ()) else None
        finalize = partial(self._finalize, answer)
        return ResponsesWriter(
            answer.response,
            params.make_parser,
            finalize,
            logprobs,
            include_timings=body.include_timings,
            random=identity.random,
        )

    async def _process_chat(
        self,
        context: RequestContext,
        chat: ChatCompletionRequest,
        size_bytes: int,
        identity: AnswerIdentity,
    ) -> ProcessedRequest:
        convert = partial(to_generation_request, chat, self._services.sampling_defaults)
        try:
            return await self._services.process(context, convert, size_bytes, identity, chat.model)
        except BadRequest as error:
            raise error.renamed(name_of) from None

    def _should_store(self, body: ResponsesRequest) -> bool:
        possible = self._config.stored_responses > 0
        wanted = body.background or body.store
        if wanted and not possible:
            raise BadRequest(
                "this server stores no responses (serve.stored_responses=0), so store=true and "
                "background=true are not supported",
                "background" if body.background else "store",
                "unsupported_value",
            )
        return possible and body.store is not False

    async def _previous_response(self, owner: SecretText, id: str | None) -> StoredLookup | None:
        """Returns the response that a request continues, if any."""
        if id is None:
            return None
        try:
            return await self._store.found(Read(table_key(owner, id)))
        except HTTPError as error:
            if error.info.status != 404:
                raise
            raise BadRequest(
                f"previous_response_id: {error}",
                "previous_response_id",
                "previous_response_not_found",
            ) from None

    async def _finalize(self, answer: _Answer) -> None:
        """Stores a finished response. If another ingress computes it now, neither the answer nor
        the failure is stored."""
        response = answer.response
        await self._count_reasoning(response)
        if not response.store:
            return
        if not response.background:
            response.store = await self._store.keep(answer.key, answer.stored)
        elif not await self._background.store(answer.key, answer.stored):
            response.output = []
            response.fail("the answer does not fit into serve.stored_response_bytes")
            await self._background.store(answer.key, answer.stored)

    async def _count_reasoning(self, response: ResponseBody) -> None:
        usage = response.usage
        if usage is None:
            return
        reasoning = [item for item in response.output if isinstance(item, ReasoningItem)]
        texts = [part.text for item in reasoning for part in item.content]
        count = self._services.input_processor.reasoning_tokens_offloaded
        usage.output_tokens_details.reasoning_tokens = await count(texts, usage.output_tokens)

    # ---------------------------------------------------------------- in the background

    async def _begin(
        self,
        context: RequestContext,
        answer: _Answer,
        params: ProcessedRequest,
        writer: ResponsesWriter,
        identity: AnswerIdentity,
    ) -> Response:
        """Begins a background response. The reply says `queued`, or is a stream. Later requests see
        `in_progress`, also while the response waits for an engine or for another ingress."""
        queued = _encode(msgspec.structs.replace(answer.response, status="queued"))
        job = make_job(context, answer.body, params.requests[0].adapter)
        handle = partial(
            self._services.serving.answer, context.detached(), params, identity=identity
        )
        if not params.stream:
            work = partial(self._run, handle, writer)
            await self._background.begin(answer.key, answer.stored, job, work)
            return json_response(queued)
        live = LiveEvents()
        work = partial(self._run_live, handle, writer, live)
        await self._background.begin(answer.key, answer.stored, job, work)
        return live.response()

    async def _resume(self, begun: Begin) -> None:
        """Computes a response again that another ingress left unfinished; the answer is the
        same."""
        size = begun.kept.size_bytes
        restored = await self._services.offloads.bodies.run_sized(size, restore_job, begun)
        body, response, chat = restored
        answer = _Answer(begun.id, begun.kept.items, body, response)
        context = job_context(begun)
        identity = msgspec.structs.replace(new_identity(context), adapter=begun.job.adapter)
        try:
            params = await self._process_chat(context, chat, size, identity)
        except BadRequest as error:  # this ingress has other limits
            response.fail(f"another ingress could not take over the response: {error}")
            return await self._finalize(answer)
        handle = partial(self._services.serving.handle_admitted, context, params, identity=identity)
        await self._run(handle, self._writer(answer, params, identity))

    async def _run(
        self, handle: Callable[[ResponsesWriter], Awaitable[Response]], writer: ResponsesWriter
    ) -> None:
        engines = ""
        try:
            engines = (await handle(writer)).headers[ENGINES]
        except Exception as error:
            writer.fail(error_info(error))
        await writer.commit(engines)

    async def _run_live(
        self,
        handle: Callable[[ResponsesWriter], Awaitable[Response]],
        writer: ResponsesWriter,
        live: LiveEvents,
    ) -> None:
        """Runs a background response whose client reads the events. The first events are sent at
        once, because they contain the id."""
        try:
            live.put(b"".join(writer.stream_start(1)))
            reply = await handle(writer)
            assert isinstance(reply, EventStreamResponse), "the client asked for a stream"
            await live.pass_on(reply)
        except Exception as error:
            writer.fail(error_info(error))
            await writer.commit("")
            live.put(b"".join(writer.stream_done()))
        finally:
            live.end()

    # ---------------------------------------------------------------- stored responses

    async def _retrieve(self, request: Request) -> Response:
        query = self._query(request, "stream", "include_obfuscation")
        if query.get("stream", "false") != "false":
            problem = "is not supported: a stored response cannot be streamed; leave it out"
            raise bad_value("stream", query["stream"], problem, "unsupported_value")
        found = await self._find(request, Read)
        is_current = found.status in (StoredStatus.DONE, StoredStatus.RUNNING)
        return json_response(found.kept.body if is_current else _current_response(found))

    async def _cancel(self, request: Request) -> Response:
        """Cancels a response. If it has already finished, the reply shows its status."""
        self._query(request)
        response = _current_response(await self._find(request, Cancel))
        if not response.background:
            raise BadRequest(
                f"the response {request.path_params['id']!r} was not created with "
                "background=true; to cancel such a response, close its connection",
                "id",
                "not_in_background",
            )
        return json_response(response)

    async def _delete(self, request: Request) -> Response:
        self._query(request)
        await self._find(request, Delete)
        return json_response(ResponseDeleted(id=request.path_params["id"]))

    async def _input_items(self, request: Request) -> Response:
        query = self._query(request, "limit", "order", "after")
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise bad_value("order", order, "must be 'asc' or 'desc'")
        limit = _limit(query.get("limit", str(_PAGE_ITEMS)))
        found = await self._find(request, Read)
        items, after = items_of(found.kept), query.get("after")
        page = item_list(items, limit=limit, after=after, newest_first=order == "desc")
        return json_response(page)

    async def _find(
        self, request: Request, kind: type[Read] | type[Cancel] | type[Delete]
    ) -> StoredLookup:
        """Sends a request for the response with the id of the route, and returns the reply."""
        key = table_key(self._services.authorize(request).owner, request.path_params["id"])
        return await self._store.found(kind(key))

    def _query(self, request: Request, *known: str) -> dict[str, str]:
        """Returns the checked query of an authorized request."""
        self._services.authorize(request)
        return checked_query(request, *known)


def _conversation(
    body: ResponsesRequest, found: StoredLookup | None
) -> tuple[ChatCompletionRequest, bytes]:
    """Returns the request as a chat request that continues the earlier response in `found`, and the
    items of the whole conversation, as JSON."""
    own, before = body.items(), []
    if found is not None:
        response = _current_response(found)
        if response.status not in ("completed", "incomplete"):
            raise bad_value(
                "previous_response_id",
                body.previous_response_id,
                f"has the status {response.status}; only a response that is completed or "
                "incomplete can be continued",
            )
        before = [*items_of(found.kept), *response.output]
    return chat_request(body, own, before), _encode([*before, *own])


def _limit(text: str) -> int:
    if not re.fullmatch("[0-9]{1,3}", text) or not 1 <= int(text) <= _MAX_PAGE_ITEMS:
        raise bad_value("limit", text, f"must be an integer between 1 and {_MAX_PAGE_ITEMS}")
    return int(text)


def _current_response(found: StoredLookup) -> ResponseBody:
    response = msgspec.json.decode(found.kept.body, type=ResponseBody)
    if found.status is StoredStatus.CANCELLED:
        response.status = "cancelled"
    if found.status is StoredStatus.LOST:
        response.fail(
            "several ingresses were lost while they computed the response, so it is not computed "
            "again; send the request again",
        )
    return response
