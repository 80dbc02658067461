"""Services that the routes of one ingress share: access, bodies, tokenizer, engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request

from swell.cluster.api.admin.protocol import RequestStory
from swell.cluster.api.answers.answer_identity import AnswerIdentity
from swell.cluster.api.answers.disconnect import with_deadline
from swell.cluster.api.answers.request_recorder import RequestRecorder
from swell.cluster.api.answers.serving_handler import ServingHandler
from swell.cluster.api.bodies.body_reader import BodyReader
from swell.cluster.api.endpoints import arm_keep_alive
from swell.cluster.api.request_context import RequestContext, context_of
from swell.cluster.api.resumable.resumable_answers import ResumableAnswers
from swell.cluster.api.server.access import Access
from swell.cluster.api.tracing.exporter import make_exporter
from swell.cluster.client.async_llm import AsyncLLM
from swell.cluster.client.engine_core_client import ConnectEngines
from swell.cluster.client.metrics import PrometheusStats
from swell.cluster.client.requests.deadline import HEADER as TIMEOUT
from swell.cluster.client.requests.deadline import deadline_of
from swell.cluster.client.requests.request_history import CancelStatus as CancelStatus
from swell.cluster.client.requests.request_history import RequestHistory
from swell.cluster.text.errors import BadRequest
from swell.cluster.text.prompt.generation_request import GenerationRequest
from swell.cluster.text.prompt.input_processor import AsyncInputProcessor, ProcessedRequest
from swell.cluster.text.prompt.pooling_processor import (
    PoolingRequest,
    generation_refusal,
    pooling_refusal,
)
from swell.cluster.text.prompt.text_services import TextServices
from swell.cluster.text.prompt.thread_offload import OffloadPools
from swell.cluster.text.schema.request_body import RequestBody
from swell.configs.lora import Adapter
from swell.configs.runtime.secret import SecretText
from swell.configs.schema import Config
from swell.coordinator.metrics import ViewCollector
from swell.coordinator.wire import ClusterView


class PeerIngresses(Protocol):
    """Calls all other ingresses. The calls return within seconds and raise nothing."""

    async def find(self, id: str, asking: int) -> tuple[list[RequestStory], bool]:
        """Returns the stories that the ingresses other than number `asking` have under an id, and
        whether all of them answered."""

    async def cancel(
        self, ids: Sequence[str], owner: SecretText, asking: int
    ) -> tuple[list[dict[str, CancelStatus]], bool]:
        """Cancels the requests of `owner` with these ids. Returns what the ingresses other than
        number `asking` did, and whether all of them answered."""


class NoPeers:
    """The case of a single ingress."""

    async def find(self, id: str, asking: int) -> tuple[list[RequestStory], bool]:
        return [], True

    async def cancel(
        self, ids: Sequence[str], owner: SecretText, asking: int
    ) -> tuple[list[dict[str, CancelStatus]], bool]:
        return [], True


Body = TypeVar("Body", bound=RequestBody)
Converted = TypeVar("Converted", GenerationRequest, PoolingRequest)


class AdapterNames:
    """The adapters of the configuration, as this ingress found their files when it started, and the
    adapters loaded since, as the newest view of the cluster lists them."""

    def __init__(self, of_config: Mapping[str, Adapter], view: Callable[[], ClusterView]) -> None:
        self.of_config = of_config
        self._view = view

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        """The adapters that were loaded while the server ran."""
        return self._view().reports.adapters

    @property
    def names(self) -> list[str]:
        return [*self.of_config, *(adapter.name for adapter in self.loaded)]

    def find(self, name: str) -> Adapter | None:
        found = self.of_config.get(name)
        return found or next((one for one in self.loaded if one.name == name), None)


class Services:
    """`connect` opens the connections to the engines, `manager` controls the engines, `store` keeps
    responses (None: nothing is kept), `peers` are the other ingresses."""

    def __init__(
        self,
        config: Config,
        connect: ConnectEngines,
        manager: Any,
        store: Any,
        text: TextServices,
        peers: PeerIngresses | None = None,
    ) -> None:
        self.config = config
        self.model = config.model.served_name
        self.created_s = text.created_s
        self.adapters = AdapterNames(text.adapters, lambda: self.llm.view)
        self.manager = manager
        self.store = store
        self.access = Access(config.serve)
        self.metrics = PrometheusStats()
        self.prompts = text.prompts
        self.sampling_defaults = text.sampling_defaults
        self.pooling = text.pooling
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
        self.resumable = ResumableAnswers(
            config.serve,
            self.offloads.bodies,
            self._versions,
            self._adapter_of,
            self.metrics.resumable,
        )

    def _versions(self) -> set[str]:
        """Returns the versions of the weights of the engines that serve."""
        return {member.version for member in self.llm.view.roster.members}

    def _adapter_of(self, model: str | None) -> Adapter | None:
        """Returns the adapter that a body names, if any."""
        return None if model is None else self.adapters.find(model)

    async def close(self) -> None:
        await self.resumable.close()
        self.llm.close()
        await self.traces.close()
        self.offloads.close()

    def authorize(self, request: Request) -> RequestContext:
        """Checks the user's key; returns the context, which then names the owner. Raises
        HTTPError."""
        context = context_of(request)
        context.set_owner(self.access.check_user(request))
        return context

    async def read_for_answer(self, request: Request, kind: type[Body]) -> Body:
        """Returns the body of a generation or pooling request. Raises TooManyWaiting before the
        body is read if too many requests wait, so that thousands are refused as fast as they
        arrive."""
        context = self.authorize(request)
        if self.pooling is not None and not kind.POOLS:
            raise generation_refusal(self.pooling.spec)
        if self.pooling is None and kind.POOLS:
            raise pooling_refusal()
        is_kept = self.resumable.has(request, context.owner)
        if self.llm.has_seen_engine and not is_kept:
            self.llm.check_admission()
        context.deadline = deadline_of(request.headers.get(TIMEOUT), context.arrived_s)
        return await self._read(request, kind, is_kept=is_kept)

    async def process(
        self,
        context: RequestContext,
        convert: Callable[[], GenerationRequest],
        size_bytes: int,
        identity: AnswerIdentity,
        model: str | None,
    ) -> ProcessedRequest:
        """Returns the engine requests of the request that `convert` makes. `model` is the name in
        its body. Raises BadRequest."""
        adapter = identity.adapter
        if adapter is None:
            self.check_model(model)  # it may have been unloaded a moment ago
            adapter = self._adapter_of(model)

        def work() -> GenerationRequest:
            made = self.with_context(convert(), context)
            params = made.params
            if params.seed is None:
                params = msgspec.structs.replace(params, seed=identity.seed)
            return msgspec.structs.replace(
                made, params=params, random=identity.random, adapter=adapter
            )

        return await self.input_processor.process(work, size_bytes)

    def with_context(self, made: Converted, context: RequestContext) -> Converted:
        """Returns a request with the id and the trace headers of its HTTP request, and the cache
        salt of its user."""
        return msgspec.structs.replace(
            made,
            external_req_id=context.id,
            trace_headers=context.trace_headers or None,
            cache_salt=self.access.prefix_salt(context.owner, made.cache_salt),
        )

    def model_name(self, model: str | None) -> str:
        """Returns the name of the model or adapter that answers a checked body with `model`."""
        return self.model if model is None else model

    def model_not_found(self, model: str) -> BadRequest:
        names = ", ".join(map(repr, (self.model, *self.adapters.names)))
        return BadRequest(
            f"the model {model!r} does not exist; this server has {names}",
            "model",
            "model_not_found",
        )

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """Returns the checked body of a request that no engine answers. Raises BadRequest,
        HTTPError and NoEngine."""
        self.authorize(request)
        return await self._read(request, kind)

    async def _read(self, request: Request, kind: type[Body], *, is_kept: bool = False) -> Body:
        """Returns a checked body for this model, once an engine has reported its limits. `is_kept`
        tells that its answer exists already, perhaps from an adapter that was unloaded since.
        Raises BadRequest, HTTPError, NoEngine and RequestTimedOut."""
        body = await self.reader.read(request, kind)
        arm_keep_alive(request, stream=bool(getattr(body, "stream", None)))
        model = getattr(body, "model", None)
        if self.llm.has_seen_view and not is_kept:
            self.check_model(model)
        await with_deadline(context_of(request), self.llm.wait_for_engine())
        if not is_kept:
            self.check_model(model)
        return body

    def check_model(self, model: str | None) -> None:
        """Raises BadRequest unless `model` names the model or an adapter. An ingress learns which
        adapters were loaded from its first view of the cluster."""
        if model not in (None, self.model) and self.adapters.find(str(model)) is None:
            raise self.model_not_found(str(model))
