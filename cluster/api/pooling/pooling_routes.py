"""The routes of pooling models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swell.cluster.api.answers.disconnect import with_deadline
from swell.cluster.api.endpoints import route
from swell.cluster.api.pooling import convert
from swell.cluster.api.pooling.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from swell.cluster.api.pooling.writer import (
    ClassificationWriter,
    EmbeddingWriter,
    RerankWriter,
    ScoreWriter,
)
from swell.cluster.api.request_context import RequestContext, context_of
from swell.cluster.api.services import Services
from swell.cluster.text.prompt.input_processor import ProcessedRequest
from swell.cluster.text.prompt.pooling_processor import PoolingProcessor, PoolingRequest


class PoolingRoutes:
    """The routes. If the served model does not pool, each is refused with the reason
    (`Services.read_for_answer`)."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._read = services.read_for_answer
        self._serving = services.serving
        self._offload = services.offloads.bodies
        self._model = services.model

    @property
    def _pooling(self) -> PoolingProcessor:
        pooling = self._services.pooling
        assert pooling is not None, "the body was refused"
        return pooling

    def routes(self) -> list[Route]:
        return [
            route("/v1/embeddings", self._embeddings, "POST"),
            *(route(path, self._classify, "POST") for path in ("/classify", "/v1/classify")),
            *(route(path, self._score, "POST") for path in ("/score", "/v1/score")),
            *(
                route(path, self._rerank, "POST")
                for path in ("/rerank", "/v1/rerank", "/v2/rerank")
            ),
        ]

    async def _embeddings(self, request: Request) -> Response:
        body, context = await self._read(request, EmbeddingRequest), context_of(request)
        params = await self._process(context, partial(convert.embedding_request, body))
        writer = EmbeddingWriter(f"embd-{context.id}", self._model, body)
        return await self._serving.pool(context, params, writer)

    async def _classify(self, request: Request) -> Response:
        body, context = await self._read(request, ClassifyRequest), context_of(request)
        params = await self._process(context, partial(convert.classify_request, body))
        id, labels = f"classify-{context.id}", self._pooling.spec.labels
        writer = ClassificationWriter(id, self._model, body, labels)
        return await self._serving.pool(context, params, writer)

    async def _score(self, request: Request) -> Response:
        body, context = await self._read(request, ScoreRequest), context_of(request)
        pairs, embeds = convert.score_pairs(body), self._pooling.spec.embeds
        work = partial(convert.score_request, body, pairs, embeds=embeds)
        params = await self._process(context, work)
        id = f"score-{context.id}"
        writer = ScoreWriter(id, self._model, body, pairs, embeds=embeds)
        return await self._serving.pool(context, params, writer)

    async def _rerank(self, request: Request) -> Response:
        body, context = await self._read(request, RerankRequest), context_of(request)
        pairs, embeds = convert.rerank_pairs(body), self._pooling.spec.embeds
        work = partial(convert.score_request, body, pairs, embeds=embeds)
        params = await self._process(context, work)
        id = f"rerank-{context.id}"
        writer = RerankWriter(id, self._model, body, pairs, embeds=embeds)
        return await self._serving.pool(context, params, writer)

    async def _process(
        self, context: RequestContext, make: Callable[[], PoolingRequest]
    ) -> ProcessedRequest:
        """Returns the engine requests of a request. A long body is tokenized in a thread."""

        def process() -> ProcessedRequest:
            return self._pooling.process(self._services.with_context(make(), context))

        return await with_deadline(context, self._offload.run_sized(context.body_bytes, process))
