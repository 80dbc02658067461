"""What clients, monitors and load balancers may know of the server: `/v1/models` (OpenAI), `/ping`
(SageMaker), `/version` and `/load` (vLLM), `/server_info` (SGLang)."""

from __future__ import annotations

import importlib.metadata

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swell.cluster.api.admin.protocol import (
    EngineLoad,
    Health,
    ModelCard,
    ModelList,
    ServerInfo,
    ServerLoad,
    Version,
)
from swell.cluster.api.routing import json_response, route
from swell.cluster.api.server.api_keys import ApiKeys
from swell.cluster.client.async_llm import AsyncLLM
from swell.cluster.text.prompts import PromptProcessor
from swell.cluster.text.sampling_params import BadRequest
from swell.configs.schema import Config

VERSION = importlib.metadata.version("swell")


class ServerRoutes:
    """`/health`, `/ping`, `/version` and `/load` are open, as `/metrics` is. The others describe
    the model and how it is served, to those who may use it."""

    def __init__(
        self,
        config: Config,
        users: ApiKeys,
        llm: AsyncLLM,
        prompts: PromptProcessor,
    ) -> None:
        self._config = config
        self._user_keys = users
        self._llm = llm
        self._prompts = prompts

    def routes(self) -> list[Route]:
        return [
            route("/health", self._health, "GET"),
            route("/ping", self._health, "GET", "POST"),
            route("/version", self._version, "GET"),
            route("/load", self._load, "GET"),
            route("/server_info", self._server_info, "GET"),
            route("/v1/models", self._models, "GET"),
            route("/v1/models/{model:path}", self._one_model, "GET"),
        ]

    async def _health(self, request: Request) -> Response:
        return json_response(Health())

    async def _version(self, request: Request) -> Response:
        return json_response(Version(version=VERSION))

    async def _load(self, request: Request) -> Response:
        loads = self._loads()
        busy = sum(load.num_running_reqs + load.num_waiting_reqs for load in loads)
        return json_response(ServerLoad(server_load=busy))

    async def _server_info(self, request: Request) -> Response:
        self._user_keys.check(request)
        config = self._config
        return json_response(
            ServerInfo(
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
        self._user_keys.check(request)
        return json_response(ModelList(data=[self._card()]))

    async def _one_model(self, request: Request) -> Response:
        self._user_keys.check(request)
        model = request.path_params["model"]
        if model != self._config.model.served_name:
            raise BadRequest(f"the model {model!r} does not exist", "model", "model_not_found")
        return json_response(self._card())

    def _card(self) -> ModelCard:
        name, longest = self._config.model.served_name, self._prompts.max_model_len
        return ModelCard(id=name, created=0, root=name, max_model_len=longest)

    def _loads(self) -> list[EngineLoad]:
        return [
            EngineLoad(
                dp_rank=report.rank,
                num_running_reqs=report.running,
                num_waiting_reqs=report.waiting,
                kv_usage=report.kv_usage,
            )
            for report in self._llm.view.reports
        ]
