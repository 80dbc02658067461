"""Services that the routes of one ingress share: access, bodies, tokenizer, engines."""

from __future__ import annotations

from typing import Any, TypeVar

from starlette.requests import Request

from swell.cluster.api.admin.peers import NoPeers, PeerStories
from swell.cluster.api.body_reader import BodyReader
from swell.cluster.api.request_recorder import RequestRecorder
from swell.cluster.api.server.access import Access
from swell.cluster.api.server.request_throttle import ARRIVAL_TIME_S
from swell.cluster.api.serving_handler import ServingHandler
from swell.cluster.api.tracing.exporter import make_exporter
from swell.cluster.client.async_llm import AsyncLLM
from swell.cluster.client.deadline import HEADER as TIMEOUT
from swell.cluster.client.deadline import deadline_of
from swell.cluster.client.engine_core_client import ConnectEngines
from swell.cluster.client.metrics import PrometheusStats
from swell.cluster.client.request_history import RequestHistory
from swell.cluster.client.router import NoEngine
from swell.cluster.text.input_processor import AsyncInputProcessor
from swell.cluster.text.offload import OffloadPools
from swell.cluster.text.sampling_params import BadRequest
from swell.cluster.text.schema.request_body import RequestBody
from swell.cluster.text.text_services import TextServices
from swell.configs.schema import Config
from swell.coordinator.metrics import ViewCollector

Body = TypeVar("Body", bound=RequestBody)


class Services:
    """`connect` opens the links to the engines, `manager` decides about them, `store` keeps
    responses (None: it keeps none), `peers` are the other ingresses."""

    def __init__(
        self,
        config: Config,
        connect: ConnectEngines,
        manager: Any,
        store: Any,
        text: TextServices,
        peers: PeerStories | None = None,
    ) -> None:
        self.config = config
        self.model = config.model.served_name
        self.manager = manager
        self.store = store
        self.access = Access(config.serve)
        self.metrics = PrometheusStats()
        self.prompts = text.prompts
        self.sampling_defaults = text.sampling_defaults
        self.offloads = OffloadPools()
        self.input_processor = AsyncInputProcessor(text.processor, self.offloads)
        self.reader = BodyReader(config.serve, self.offloads.bodies, self.metrics.ignored)
        self.llm = AsyncLLM(
            text.detokenizer, config, connect, self.metrics, text.prompts.set_limits
        )
        self.metrics.registry.register(ViewCollector(lambda: self.llm.view))
        self.peers = peers or NoPeers()
        history = RequestHistory(config.serve.request_history, config.serve.request_history_s)
        self.traces = make_exporter(config.serve.otlp_endpoint, self.metrics.traced)
        self.recorder = RequestRecorder(history, self.traces, self.llm.client_index)
        self.serving = ServingHandler(self.llm, self.offloads.answers, self.recorder)

    async def close(self) -> None:
        self.llm.close()
        await self.traces.close()
        self.offloads.close()

    async def read_for_answer(self, request: Request, kind: type[Body]) -> Body:
        """The body of a request for an answer. Raises TooManyWaiting before it is read where too
        many wait: thousands are refused as fast as they come."""
        self.access.check_user(request)
        if self.llm.has_seen_engine:
            self.llm.check_admission()
        came_s = request.scope[ARRIVAL_TIME_S]
        request.state.deadline = deadline_of(request.headers.get(TIMEOUT), came_s)
        return await self.read(request, kind)

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """A checked body for this model. Raises BadRequest, HTTPError, and NoEngine before the
        first engine has reported its limits; while no engine is left, requests wait."""
        self.access.check_user(request)
        body = await self.reader.read(request, kind)
        model = getattr(body, "model", None)
        if model is not None and model != self.model:
            raise BadRequest(
                f"the model {model!r} does not exist; this server has {self.model!r}",
                "model",
                "model_not_found",
            )
        if not self.llm.has_seen_engine:
            raise NoEngine("no engine is ready yet")
        return body
