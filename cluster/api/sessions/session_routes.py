"""Sessions over HTTP: their routes, and their chunks, which arrive at `/v1/completions`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swell.cluster.api.answers.answer_identity import AnswerIdentity
from swell.cluster.api.answers.disconnect import with_deadline
from swell.cluster.api.answers.event_stream import EventStreamResponse
from swell.cluster.api.answers.response_writer import ENGINES
from swell.cluster.api.bodies.body_reader import read_short_body, warn_of_keywords
from swell.cluster.api.bodies.protocol_base import Usage
from swell.cluster.api.bodies.query import checked_query
from swell.cluster.api.completions.convert import to_generation_request
from swell.cluster.api.completions.protocol import CompletionRequest
from swell.cluster.api.completions.writer import CompletionResponseWriter
from swell.cluster.api.endpoints import json_response, route
from swell.cluster.api.request_context import RequestContext
from swell.cluster.api.services import Services
from swell.cluster.api.sessions.protocol import (
    CreateSessionRequest,
    SessionBody,
    SessionDeleted,
)
from swell.cluster.api.sessions.session_client import OpenChunk, SessionClient
from swell.cluster.api.store.session_store import Session
from swell.cluster.client.requests.outputs import CompletionOutput, RequestOutput
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.prompt.generation_request import GenerationRequest, SessionPrefix
from swell.cluster.text.prompt.input_processor import ProcessedRequest
from swell.cluster.text.schema.decode import decode
from swell.configs.runtime.secret import SecretText

_MAX_BODY_BYTES = 64 * 1024


class SessionRoutes:
    """A chunk becomes a part of its session only when the end of its answer is sent. If its client
    leaves earlier, or its answer fails, the session stays as it was."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._limits = services.config.serve
        self._client = SessionClient(services.store, services.config.serve)

    def routes(self) -> list[Route]:
        return [
            route("/v1/sessions", self._create, "POST"),
            route("/v1/sessions/{id}", self._read, "GET"),
            route("/v1/sessions/{id}", self._end, "DELETE"),
        ]

    def start(self) -> None:
        self._client.start()

    async def close(self) -> None:
        await self._client.close()

    # ---------------------------------------------------------------- a chunk

    async def answer(
        self, body: CompletionRequest, context: RequestContext, identity: AnswerIdentity
    ) -> Response:
        """Returns the answer to a chunk: the answer to one prompt that consists of all earlier
        tokens and the chunk."""
        services, id = self._services, str(body.session)
        if identity.is_repeatable and body.session_chunk is None:
            raise BadRequest(
                "a request with an Idempotency-Key needs session_chunk, the number of chunks "
                "before this one, so that the answer can be computed again",
                "session_chunk",
                "missing_field",
            )
        until_s = float("inf") if context.deadline is None else context.deadline.at_s
        while True:
            found = self._client.find(context.owner, id, body.session_chunk, until_s)
            chunk = await with_deadline(context, found)
            params = await self._process(body, context, identity, chunk)
            services.llm.check_admission()
            try:
                # Do not begin a chunk that an earlier attempt of this request may have committed.
                may_be_there = identity.is_repeatable and not chunk.is_last
                if may_be_there or await with_deadline(context, self._client.begin(chunk)):
                    return await self._answer(body, context, identity, chunk, params)
            except BaseException:
                self._client.close_chunk(chunk)
                raise

    async def _process(
        self,
        body: CompletionRequest,
        context: RequestContext,
        identity: AnswerIdentity,
        chunk: OpenChunk,
    ) -> ProcessedRequest:
        size = context.body_bytes + chunk.session.size_bytes
        convert = partial(self._convert, body, chunk)
        processing = self._services.process(context, convert, size, identity, body.model)
        params = await with_deadline(context, _of_session(processing, chunk))
        warn_of_keywords(context, params.ignored_keywords)
        return params

    async def _answer(
        self,
        body: CompletionRequest,
        context: RequestContext,
        identity: AnswerIdentity,
        chunk: OpenChunk,
        params: ProcessedRequest,
    ) -> Response:
        (sent,) = params.requests

        async def commit(answer_ids: Sequence[int], engines: str) -> None:
            ids, rank = [*sent.prompt_token_ids, *answer_ids], int(engines.rpartition(",")[2])
            if identity.is_repeatable and not chunk.is_last:
                if chunk.has(ids):
                    return
                await self._client.begin(chunk)
            await self._client.commit(chunk, ids, rank)

        cmpl, model = f"cmpl-{identity.id}", self._services.model_name(body.model)
        writer = SessionChunkWriter(cmpl, model, body, identity.created, commit)
        reply = await self._services.serving.answer(context, params, writer, identity)
        if isinstance(reply, EventStreamResponse):
            reply.add_end(partial(self._client.close_chunk, chunk))
            return reply
        await with_deadline(context, writer.commit(reply.headers[ENGINES]))
        self._client.close_chunk(chunk)
        return reply

    def _convert(self, body: CompletionRequest, chunk: OpenChunk) -> GenerationRequest:
        """Converts the body. By default, only the first chunk of a session gets the tokenizer's
        special tokens."""
        converted = to_generation_request(body, self._services.sampling_defaults)
        options = converted.tokenize_options
        if body.add_special_tokens is None:
            options = options._replace(add_special_tokens=chunk.is_first)
        prefix = SessionPrefix(chunk.token_ids, chunk.session.rank)
        return msgspec.structs.replace(converted, tokenize_options=options, prefix=prefix)

    # ---------------------------------------------------------------- a session

    async def _create(self, request: Request) -> Response:
        owner = self._services.authorize(request).owner
        checked_query(request)
        decode(await read_short_body(request, _MAX_BODY_BYTES), CreateSessionRequest)
        return json_response(self._body(*await self._client.create(owner)))

    async def _read(self, request: Request) -> Response:
        id = request.path_params["id"]
        return json_response(self._body(id, await self._client.read(self._owner(request), id)))

    async def _end(self, request: Request) -> Response:
        id = request.path_params["id"]
        await self._client.end(self._owner(request), id)
        return json_response(SessionDeleted(id=id))

    def _owner(self, request: Request) -> SecretText:
        owner = self._services.authorize(request).owner
        checked_query(request)
        return owner

    def _body(self, id: str, session: Session) -> SessionBody:
        return SessionBody(
            id=id,
            created_at=session.created,
            chunks=len(session.ends),
            tokens=session.num_tokens,
            idle_limit_s=self._limits.session_idle_s,
        )


async def _of_session(
    processing: Awaitable[ProcessedRequest], chunk: OpenChunk
) -> ProcessedRequest:
    """Returns the result of `processing`. If the prompt is too long, the error says how many of its
    tokens belong to the session."""
    try:
        return await processing
    except BadRequest as error:
        if error.code != "context_length_exceeded" or not chunk.num_tokens:
            raise
        raise error.with_note(
            f" {chunk.num_tokens} of these tokens belong to the session: create another session, "
            "or go back to an earlier chunk with session_chunk."
        ) from None


CommitChunk = Callable[[Sequence[int], str], Awaitable[None]]
"""Commits the tokens of an answer. The second argument is the header that lists the engines that
served it."""


class SessionChunkWriter(CompletionResponseWriter):
    """Commits the tokens of an answer, unless it failed: the next chunk continues after them."""

    def __init__(
        self, id: str, model: str, body: CompletionRequest, created: int, commit_chunk: CommitChunk
    ) -> None:
        super().__init__(id, model, body, created)
        self._answer_ids: list[int] = []
        self._commit_chunk = commit_chunk
        self._last: list[bytes] = []
        """The event with the finish reason, which many clients take for the end."""

    def full_response(self, outputs: list[RequestOutput], usage: Usage) -> msgspec.Struct:
        for output in outputs:
            self._answer_ids += self._shown(output.outputs[0]).token_ids
        return super().full_response(outputs, usage)

    def delta(self, choice: int, output: RequestOutput, part: CompletionOutput) -> Iterable[bytes]:
        self._answer_ids += self._shown(part).token_ids
        events = super().delta(choice, output, part)
        if part.finish_reason is None:
            return events
        self._last = [*events]
        return ()

    def stream_end(self, usage: Usage) -> Iterable[bytes]:
        return [*self._last, *super().stream_end(usage)]

    async def commit(self, engines: str) -> None:
        if not self.failed:
            await self._commit_chunk(self._answer_ids, engines)
