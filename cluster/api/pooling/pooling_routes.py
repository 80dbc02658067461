"""The routes of pooling models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from swell.cluster.api.answers.disconnect import with_deadline
from swell.cluster.api.bodies.body_reader import body_bytes
from swell.cluster.api.pooling import convert
from swell.cluster.api.pooling.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from swell.cluster.api.pooling.serving import (
    ClassificationWriter,
    EmbeddingWriter,
    RerankWriter,
    ScoreWriter,
)
from swell.cluster.api.routing import request_id, route
from swell.cluster.api.services import Services
from swell.cluster.api.tracing.exporter import trace_headers
from swell.cluster.text.prompt.input_processor import ProcessedRequest
from swell.cluster.text.prompt.pooling_processor import PoolingProcessor, PoolingRequest


class PoolingRoutes:
    """The routes. If the served model does not pool, each is refused with the reason
    (`Services.read_for_answer`)."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._access = services.access
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

    async def _embeddings(self, request: Request) -> Any:
        body = await self._read(request, EmbeddingRequest)
        params = await self._process(request, partial(convert.embedding_request, body))
        writer = EmbeddingWriter(f"embd-{request_id(request)}", self._model, body)
        return await self._serving.pool(request, params, writer)

    async def _classify(self, request: Request) -> Any:
        body = await self._read(request, ClassifyRequest)
        params = await self._process(request, partial(convert.classify_request, body))
        id, labels = f"classify-{request_id(request)}", self._pooling.spec.labels
        writer = ClassificationWriter(id, self._model, body, labels)
        return await self._serving.pool(request, params, writer)

    async def _score(self, request: Request) -> Any:
        body = await self._read(request, ScoreRequest)
        pairs, embeds = convert.score_pairs(body), self._pooling.spec.embeds
        work = partial(convert.score_request, body, pairs, embeds=embeds)
        params = await self._process(request, work)
        id = f"score-{request_id(request)}"
        writer = ScoreWriter(id, self._model, body, pairs, embeds=embeds)
        return await self._serving.pool(request, params, writer)

    async def _rerank(self, request: Request) -> Any:
        body = await self._read(request, RerankRequest)
        pairs, embeds = convert.rerank_pairs(body), self._pooling.spec.embeds
        work = partial(convert.score_request, body, pairs, embeds=embeds)
        params = await self._process(request, work)
        id = f"rerank-{request_id(request)}"
        writer = RerankWriter(id, self._model, body, pairs, embeds=embeds)
        return await self._serving.pool(request, params, writer)

    async def _process(
        self, request: Request, make: Callable[[], PoolingRequest]
    ) -> ProcessedRequest:
        """Returns the engine requests of a request. A long body is tokenized in a thread."""
        owner = self._access.check_user(request)
        id, headers = request_id(request), trace_headers(request) or None

        def process() -> ProcessedRequest:
            made = make()
            salt = self._access.prefix_salt(owner, made.cache_salt)
            made = msgspec.structs.replace(
                made, external_req_id=id, trace_headers=headers, cache_salt=salt
            )
            return self._pooling.process(made)

        return await with_deadline(request, self._offload.run_sized(body_bytes(request), process))
