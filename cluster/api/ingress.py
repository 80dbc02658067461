"""The HTTP routes of one ingress, and what they share: tokenizer, engines, keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swell.cluster.api.admin.protocol import Readiness
from swell.cluster.api.admin.serving import AdminRoutes
from swell.cluster.api.body_reader import BodyReader, body_bytes
from swell.cluster.api.chat import convert as chat_convert
from swell.cluster.api.chat.protocol import ChatCompletionRequest
from swell.cluster.api.chat.serving import ChatResponseWriter
from swell.cluster.api.completions import convert as completion_convert
from swell.cluster.api.completions.protocol import CompletionRequest
from swell.cluster.api.completions.serving import CompletionResponseWriter
from swell.cluster.api.disconnect import with_deadline
from swell.cluster.api.http_errors import HTTPError
from swell.cluster.api.messages import convert as messages_convert
from swell.cluster.api.messages.message import TokenCount
from swell.cluster.api.messages.protocol import CountTokensRequest, MessagesRequest
from swell.cluster.api.messages.serving import MessagesResponseWriter
from swell.cluster.api.openapi.document import openapi_document
from swell.cluster.api.responses.routes import ResponseRoutes
from swell.cluster.api.routing import (
    StripTrailingSlash,
    json_response,
    no_such_route,
    request_id,
    route,
)
from swell.cluster.api.server.access import AccessRules, UserKeys
from swell.cluster.api.server.cors import Cors, CorsRules
from swell.cluster.api.server.request_throttle import ARRIVAL_TIME_S, RequestThrottle
from swell.cluster.api.server_info import ServerRoutes
from swell.cluster.api.serving_handler import ServingHandler
from swell.cluster.api.tokenize import TokenizeRoutes
from swell.cluster.client.async_llm import AsyncLLM
from swell.cluster.client.deadline import HEADER as TIMEOUT
from swell.cluster.client.deadline import deadline_of
from swell.cluster.client.engine_core_client import ConnectEngines
from swell.cluster.client.metrics import PrometheusStats
from swell.cluster.client.router import NoEngine
from swell.cluster.text.generation_request import GenerationRequest
from swell.cluster.text.input_processor import AsyncInputProcessor, RequestParams
from swell.cluster.text.offload import OffloadPools
from swell.cluster.text.sampling_params import BadRequest
from swell.cluster.text.schema.request_body import RequestBody
from swell.cluster.text.text_services import TextServices
from swell.cluster.text.truncation import TEMPLATE_TEXT
from swell.configs.schema import Config
from swell.coordinator.metrics import ViewCollector

_MANAGER_TIMEOUT_S = 5.0
"""How long a probe waits for what the manager knows."""


async def build_ingress(
    config: Config, connect: ConnectEngines, manager: Any, store: Any = None
) -> Ingress:
    """Load the tokenizer, connect to the engines, and wait until they are known: a replica that
    takes the place of another one must not refuse what it would have served."""
    text = await asyncio.to_thread(TextServices.load, config)
    ingress = Ingress(config, connect, manager, store, text)
    await ingress.llm.wait_for_view()
    ingress.start_background()
    return ingress


class Ingress:
    """One ingress replica without its shell, made by `build_ingress`. `connect` opens its links to
    the engines, `manager` answers the admin routes, `store` keeps responses (None: it keeps
    none)."""

    def __init__(
        self,
        config: Config,
        connect: ConnectEngines,
        manager: Any,
        store: Any,
        text: TextServices,
    ) -> None:
        self._config = config
        self._model = config.model.served_name
        self._manager = manager
        self._metrics = PrometheusStats()
        self._rules = AccessRules(config.serve)
        self._user_keys = UserKeys(config.serve, self._rules)
        self._prompts = text.prompts
        self._sampling_defaults = text.sampling_defaults
        self._offloads = OffloadPools()
        self._input_processor = AsyncInputProcessor(text.processor, self._offloads)
        self._reader = BodyReader(
            config.serve.max_body_bytes,
            self._offloads.bodies,
            config.serve.unknown_fields,
            self._metrics.ignored,
        )
        self.llm = AsyncLLM(
            text.detokenizer, config, connect, self._metrics, text.prompts.set_limits
        )
        self._metrics.registry.register(ViewCollector(lambda: self.llm.view))
        self._serving = ServingHandler(self.llm, self._offloads.answers)
        self._responses = ResponseRoutes(
            config.serve,
            self._model,
            self._user_keys,
            store,
            self._generation_body,
            self._input_processor,
            text.sampling_defaults,
            self._serving,
            self._offloads.bodies,
            self.llm,
        )
        self.app = Starlette(
            routes=self._routes(),
            exception_handlers={404: no_such_route, 405: no_such_route},
            middleware=[
                Middleware(Cors, CorsRules.of(config.serve)),
                Middleware(StripTrailingSlash),
                Middleware(RequestThrottle),
            ],
        )
        self.app.router.redirect_slashes = False

    def start_background(self) -> None:
        """Begin to take over responses that other ingresses left unfinished."""
        self._responses.start()

    async def stop(self) -> None:
        await self._responses.close()
        self.llm.close()
        self._offloads.close()

    def _routes(self) -> list[Route]:
        admin = AdminRoutes(self._config.serve, self._rules, self._manager, self.llm)
        server = ServerRoutes(self._config, self._user_keys, self.llm, self._prompts)
        tokenize = TokenizeRoutes(
            self._body, self._input_processor, self._prompts, self._offloads.bodies
        )
        return [
            route("/ready", self._ready, "GET"),
            route("/metrics", self._show_metrics, "GET"),
            route("/openapi.json", self._openapi, "GET"),
            route("/v1/completions", self._completions, "POST"),
            route("/v1/chat/completions", self._chat, "POST"),
            *self._responses.routes(),
            route("/v1/messages", self._messages, "POST"),
            route("/v1/messages/count_tokens", self._count_tokens, "POST"),
            *tokenize.routes(),
            *server.routes(),
            *admin.routes(),
        ]

    # ---------------------------------------------------------------- generation

    async def _completions(self, request: Request) -> Any:
        body = await self._generation_body(request, CompletionRequest)
        params = await self._process(request, completion_convert.to_generation_request, body)
        writer = CompletionResponseWriter(f"cmpl-{request_id(request)}", self._model, body)
        return await self._serving.answer(request, params, writer)

    async def _chat(self, request: Request) -> Any:
        body = await self._generation_body(request, ChatCompletionRequest)
        params = await self._process(request, chat_convert.to_generation_request, body)
        id = f"chatcmpl-{request_id(request)}"
        writer = ChatResponseWriter(id, self._model, body, params.make_parser)
        return await self._serving.answer(request, params, writer)

    async def _messages(self, request: Request) -> Any:
        body = await self._generation_body(request, MessagesRequest)
        params = await self._process(request, messages_convert.to_generation_request, body)
        writer = MessagesResponseWriter(request_id(request), self._model, body, params.make_parser)
        return await self._serving.answer(request, params, writer)

    async def _process(
        self,
        request: Request,
        convert: Callable[[Any, Mapping[str, Any]], GenerationRequest],
        body: Any,
    ) -> RequestParams:
        work = partial(convert, body, self._sampling_defaults)
        return await with_deadline(
            request, self._input_processor.process(work, body_bytes(request))
        )

    async def _count_tokens(self, request: Request) -> Response:
        body = await self._body(request, CountTokensRequest)
        ids = await self._input_processor.tokenize(
            lambda: (messages_convert.conversation(body), TEMPLATE_TEXT), body_bytes(request)
        )
        return json_response(TokenCount(input_tokens=len(ids)))

    async def _generation_body(self, request: Request, kind: type[Any]) -> Any:
        """The body of a request for an answer. Raises TooManyWaiting before it is read where too
        many wait: thousands are refused as fast as they come."""
        self._user_keys.check(request)
        if self.llm.has_seen_engine:
            self.llm.check_admission()
        came_s = request.scope[ARRIVAL_TIME_S]
        request.state.deadline = deadline_of(request.headers.get(TIMEOUT), came_s)
        return await self._body(request, kind)

    async def _body(self, request: Request, kind: type[Any]) -> Any:
        """A checked body for this model. Raises BadRequest, HTTPError, and NoEngine before the
        first engine has reported its limits; while no engine is left, requests wait."""
        self._user_keys.check(request)
        body: RequestBody = await self._reader.read(request, kind)
        model = getattr(body, "model", None)
        if model is not None and model != self._model:
            raise BadRequest(
                f"the model {model!r} does not exist; this server has {self._model!r}",
                "model",
                "model_not_found",
            )
        if not self.llm.has_seen_engine:
            raise NoEngine("no engine is ready yet")
        return body

    # ---------------------------------------------------------------- the rest

    async def _ready(self, request: Request) -> Response:
        """200 if an engine can make progress. A silent coordinator alone is no reason against it:
        serving goes on with the engines that were there."""
        state = self.llm.check_ready()
        if state.ranks:
            coordinator = "silent" if state.coordinator_silent else "ok"
            return json_response(Readiness(engines=state.ranks, coordinator=coordinator))
        if state.reason:
            raise HTTPError(503, state.reason, "no_progress", "server_error")
        try:
            async with asyncio.timeout(_MANAGER_TIMEOUT_S):
                reason, failed = await self._manager.not_ready_reason.remote()
        except Exception as error:  # whatever keeps the manager from answering
            raise HTTPError(
                503, f"no engine, and no word of the manager: {error!r}", "starting", "server_error"
            ) from None
        code = "cluster_failed" if failed else "starting"
        raise HTTPError(503, reason, code, "server_error")

    async def _show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")

    async def _openapi(self, request: Request) -> Response:
        return json_response(openapi_document(self._config.serve.unknown_fields))
