"""The HTTP routes of one ingress."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from swell.cluster.api.admin.adapter_routes import AdapterRoutes
from swell.cluster.api.admin.admin_routes import AdminRoutes
from swell.cluster.api.admin.protocol import RequestStory
from swell.cluster.api.answers.answer_identity import AnswerIdentity
from swell.cluster.api.answers.disconnect import with_deadline
from swell.cluster.api.bodies.body_reader import Body, warn_of_keywords
from swell.cluster.api.cancel import CancelRoutes
from swell.cluster.api.chat import convert as chat_convert
from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.api.chat.writer import ChatResponseWriter
from swell.cluster.api.completions import convert as completion_convert
from swell.cluster.api.completions.protocol import CompletionRequest
from swell.cluster.api.completions.writer import CompletionResponseWriter
from swell.cluster.api.endpoints import StripTrailingSlash, json_response, no_such_route, route
from swell.cluster.api.live.event_routes import EventRoutes
from swell.cluster.api.messages import convert as messages_convert
from swell.cluster.api.messages.message import TokenCount
from swell.cluster.api.messages.protocol import CountTokensRequest, MessagesRequest
from swell.cluster.api.messages.writer import MessagesResponseWriter
from swell.cluster.api.pooling.pooling_routes import PoolingRoutes
from swell.cluster.api.request_context import (
    RequestContext,
    RequestContextMiddleware,
    context_of,
)
from swell.cluster.api.responses.response_routes import ResponseRoutes
from swell.cluster.api.server.cors import Cors, CorsRules
from swell.cluster.api.server.request_throttle import RequestThrottle
from swell.cluster.api.server_info import NotReady, ServerRoutes
from swell.cluster.api.services import PeerIngresses, Services
from swell.cluster.api.sessions.session_routes import SessionRoutes
from swell.cluster.api.tokenize import TokenizeRoutes
from swell.cluster.api.web.page_routes import PageRoutes
from swell.cluster.client.engine_core_client import ConnectEngines
from swell.cluster.client.requests.request_history import CancelStatus
from swell.cluster.text.prompt.generation_request import GenerationRequest
from swell.cluster.text.prompt.input_processor import ProcessedRequest
from swell.cluster.text.prompt.text_services import TextServices
from swell.cluster.text.prompt.truncation import TEMPLATE_TEXT
from swell.configs.runtime.secret import SecretText
from swell.configs.schema import Config

Answered = TypeVar("Answered", ChatCompletionRequest, CompletionRequest, MessagesRequest)
"""The body of a request that engines answer."""


async def build_ingress(
    config: Config,
    connect: ConnectEngines,
    manager: Any,
    store: Any = None,
    peers: PeerIngresses | None = None,
) -> Ingress:
    """Loads the tokenizer, connects to the engines, and waits until they are known, so that a
    replacement replica does not refuse requests that its predecessor would have served. The
    arguments are those of `Services`."""
    text = await asyncio.to_thread(TextServices.load, config)
    ingress = Ingress(Services(config, connect, manager, store, text, peers))
    await ingress.llm.wait_for_view()
    ingress.start_background()
    return ingress


class Ingress:
    """One ingress replica without its Ray deployment, made by `build_ingress`."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self.llm = services.llm
        self._responses = ResponseRoutes(services)
        self._sessions = SessionRoutes(services)
        self._server = ServerRoutes(services)
        self._events = EventRoutes(services)
        self.app = Starlette(
            routes=[
                route("/v1/completions", self._completions, "POST"),
                route("/v1/chat/completions", self._chat, "POST"),
                *self._responses.routes(),
                *self._sessions.routes(),
                route("/v1/messages", self._messages, "POST"),
                route("/v1/messages/count_tokens", self._count_tokens, "POST"),
                *PoolingRoutes(services).routes(),
                *TokenizeRoutes(services).routes(),
                *CancelRoutes(services).routes(),
                *self._server.routes(),
                *AdminRoutes(services).routes(),
                *self._events.routes(),
                *AdapterRoutes(services).routes(),
                *PageRoutes().routes(),
            ],
            exception_handlers={404: no_such_route, 405: no_such_route},
            middleware=[
                Middleware(Cors, CorsRules.of(services.config.serve)),
                Middleware(StripTrailingSlash),
                Middleware(RequestContextMiddleware, services.config.serve.keep_alive_s),
                Middleware(RequestThrottle),
            ],
        )
        self.app.router.redirect_slashes = False

    async def not_ready(self) -> NotReady | None:
        """Returns the reason for which `/ready` is not 200; None: an engine can make progress."""
        return await self._server.not_ready()

    def start_background(self) -> None:
        """Starts taking over responses that other ingresses left unfinished, and reporting
        sessions."""
        self._responses.start()
        self._sessions.start()

    def find_requests(self, id: str, asking: int) -> list[RequestStory]:
        """Returns what this ingress knows about a request; empty if this ingress is number
        `asking`, which asks its peers."""
        if asking == self.llm.client_index:
            return []
        return self.services.recorder.find(id)

    def cancel_requests(
        self, ids: Sequence[str], owner: SecretText, asking: int
    ) -> dict[str, CancelStatus]:
        """Cancels requests of `owner` at this ingress, unless it is number `asking`."""
        if asking == self.llm.client_index:
            return {}
        return self.services.recorder.cancel(ids, owner)

    def begin_drain(self) -> None:
        """From now on `/ready` returns 503, so that load balancers send new requests elsewhere."""
        self._server.begin_drain()
        self._events.end_streams()

    def end_requests(self, drained_s: float) -> None:
        """Terminates the requests that have not finished within the drain timeout."""
        self.llm.end_requests(
            f"the server is shutting down, and the answer was not complete after {drained_s:g} s "
            "(cluster.drain_timeout_s); send the request again"
        )

    async def stop(self) -> None:
        await self._responses.close()
        await self._sessions.close()
        await self.services.close()

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionRequest, self._begin_completions)

    async def _begin_completions(
        self, body: CompletionRequest, context: RequestContext, identity: AnswerIdentity
    ) -> Response:
        if body.session is not None:
            return await self._sessions.answer(body, context, identity)
        convert = completion_convert.to_generation_request
        params = await self._process(context, convert, body, identity)
        id, model = f"cmpl-{identity.id}", self.services.model_name(body.model)
        writer = CompletionResponseWriter(id, model, body, identity.created)
        return await self.services.serving.answer(context, params, writer, identity)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, ChatCompletionRequest, self._begin_chat)

    async def _begin_chat(
        self, body: ChatCompletionRequest, context: RequestContext, identity: AnswerIdentity
    ) -> Response:
        convert = chat_convert.to_generation_request
        params = await self._process(context, convert, body, identity)
        id, model = f"chatcmpl-{identity.id}", self.services.model_name(body.model)
        writer = ChatResponseWriter(
            *(id, model, body, params.make_parser),
            created=identity.created,
            counter=self.services.input_processor,
        )
        return await self.services.serving.answer(context, params, writer, identity)

    async def _messages(self, request: Request) -> Response:
        return await self._answer(request, MessagesRequest, self._begin_message)

    async def _begin_message(
        self, body: MessagesRequest, context: RequestContext, identity: AnswerIdentity
    ) -> Response:
        convert = messages_convert.to_generation_request
        params = await self._process(context, convert, body, identity)
        model = self.services.model_name(body.model)
        writer = MessagesResponseWriter(identity.id, model, body, params.make_parser)
        return await self.services.serving.answer(context, params, writer, identity)

    async def _answer(
        self,
        request: Request,
        kind: type[Body],
        begin: Callable[[Body, RequestContext, AnswerIdentity], Awaitable[Response]],
    ) -> Response:
        services = self.services
        body = await services.read_for_answer(request, kind)
        return await services.resumable.answer(request, body, partial(begin, body))

    async def _process(
        self,
        context: RequestContext,
        convert: Callable[[Answered, Mapping[str, Any]], GenerationRequest],
        body: Answered,
        identity: AnswerIdentity,
    ) -> ProcessedRequest:
        work = partial(convert, body, self.services.sampling_defaults)
        size = context.body_bytes
        processing = self.services.process(context, work, size, identity, body.model)
        params = await with_deadline(context, processing)
        warn_of_keywords(context, params.ignored_keywords)
        return params

    async def _count_tokens(self, request: Request) -> Response:
        body = await self.services.read(request, CountTokensRequest)
        ids = await self.services.input_processor.tokenize(
            lambda: (messages_convert.conversation(body), TEMPLATE_TEXT),
            context_of(request).body_bytes,
        )
        return json_response(TokenCount(input_tokens=len(ids)))
