"""Routes that describe the server to clients, monitors and load balancers: `/v1/models` (OpenAI),
`/ping` (SageMaker), `/version` and `/load` (vLLM), `/server_info` (SGLang)."""

from __future__ import annotations

import asyncio
import importlib.metadata

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swell.cluster.api.admin import protocol as admin
from swell.cluster.api.bodies.http_errors import HTTPError
from swell.cluster.api.bodies.query import checked_query
from swell.cluster.api.endpoints import is_anthropic, json_response, route
from swell.cluster.api.messages.model_list import QUERY, ModelInfo, model_info, model_page
from swell.cluster.api.openapi.document import openapi_document
from swell.cluster.api.services import Services

VERSION = importlib.metadata.version("swell")
START_FAILED = "cluster_failed"
"""The error code if the first start has failed: no engine will start without an operator."""
_MANAGER_TIMEOUT_S = 5.0
"""How long a probe waits for the manager's reply."""


class NotReady(msgspec.Struct, frozen=True):
    """The reason for which `/ready` is not 200."""

    reason: str
    code: str
    """The code of the error in the answer."""


class ServerRoutes:
    """`/v1/models` and `/server_info` describe the model and how it is served, and need a user's
    key. The other routes are open."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._config = services.config
        self._llm = services.llm
        self._prompts = services.prompts
        self._is_draining = False

    def begin_drain(self) -> None:
        """Marks this ingress as shutting down: it is not ready any more."""
        self._is_draining = True

    def routes(self) -> list[Route]:
        return [
            route("/health", self._health, "GET"),
            route("/ready", self._ready, "GET"),
            route("/metrics", self._metrics, "GET"),
            route("/openapi.json", self._openapi, "GET"),
            route("/ping", self._health, "GET", "POST"),
            route("/version", self._version, "GET"),
            route("/load", self._load, "GET"),
            route("/server_info", self._server_info, "GET"),
            route("/v1/models", self._models, "GET"),
            route("/v1/models/{model:path}", self._one_model, "GET"),
        ]

    async def _health(self, request: Request) -> Response:
        return json_response(admin.Health())

    async def _ready(self, request: Request) -> Response:
        """Returns 200 if an engine can make progress, even if the coordinator is silent: serving
        goes on with the engines known last."""
        if found := await self.not_ready():
            raise HTTPError(503, found.reason, found.code)
        state = self._llm.check_ready()
        coordinator = "silent" if state.coordinator_silent else "ok"
        return json_response(admin.Readiness(engines=state.ranks, coordinator=coordinator))

    async def not_ready(self) -> NotReady | None:
        """Returns the reason for which no engine can make progress for this ingress; None: one
        can."""
        if self._is_draining:
            return NotReady(
                "this ingress is shutting down, and finishes its running requests", "draining"
            )
        state = self._llm.check_ready()
        if state.ranks:
            return None
        if state.reason:
            return NotReady(state.reason, "no_progress")
        try:
            async with asyncio.timeout(_MANAGER_TIMEOUT_S):
                reason, failed = await self._services.manager.not_ready_reason.remote()
        except Exception as error:  # any error of the call
            reason, failed = f"no engine is ready; the manager does not answer: {error!r}", False
        return NotReady(reason, START_FAILED if failed else "starting")

    async def _metrics(self, request: Request) -> Response:
        metrics = self._services.metrics.render()
        return Response(metrics, media_type="text/plain; version=0.0.4")

    async def _openapi(self, request: Request) -> Response:
        return json_response(openapi_document(self._config.serve.unknown_fields))

    async def _version(self, request: Request) -> Response:
        return json_response(admin.Version(version=VERSION))

    async def _load(self, request: Request) -> Response:
        loads = self._loads()
        busy = sum(load.num_running_reqs + load.num_waiting_reqs for load in loads)
        return json_response(admin.ServerLoad(server_load=busy))

    async def _server_info(self, request: Request) -> Response:
        self._services.authorize(request)
        config = self._config
        return json_response(
            admin.ServerInfo(
                version=VERSION,
                served_model_name=config.model.served_name,
                context_length=self._prompts.max_model_len,
                dtype=config.model.dtype,
                dp_size=len(self._llm.view.roster.ranks),
                tp_size=config.parallel.tensor,
                pp_size=config.parallel.pipeline,
                max_running_requests=config.scheduler.max_rows,
                internal_states=self._loads(),
            )
        )

    async def _models(self, request: Request) -> Response:
        self._services.authorize(request)
        names = [self._services.model, *self._services.adapters.names]
        if is_anthropic(request):
            models = [self._anthropic_card(name) for name in names]
            return json_response(model_page(models, checked_query(request, *QUERY)))
        return json_response(admin.ModelList(data=[self._card(name) for name in names]))

    async def _one_model(self, request: Request) -> Response:
        self._services.authorize(request)
        model = request.path_params["model"]
        self._services.check_model(model)
        if is_anthropic(request):
            return json_response(self._anthropic_card(model))
        return json_response(self._card(model))

    def _card(self, name: str) -> admin.ModelCard:
        base, longest = self._services.model, self._prompts.max_model_len
        parent = None if name == base else base
        return admin.ModelCard(
            id=name,
            created=self._services.created_s,
            root=base,
            parent=parent,
            max_model_len=longest,
        )

    def _anthropic_card(self, name: str) -> ModelInfo:
        return model_info(name, self._services.created_s, self._prompts.max_model_len)

    def _loads(self) -> list[admin.EngineLoad]:
        return [
            admin.EngineLoad(
                dp_rank=report.rank,
                num_running_reqs=report.running,
                num_waiting_reqs=report.waiting,
                kv_usage=report.kv_usage,
            )
            for report in self._llm.view.reports.engines
        ]
