"""Writes the answers of pooling requests."""

from __future__ import annotations

import base64

import msgspec

from swell.cluster.api.answers.response_writer import AnswerWriter
from swell.cluster.api.bodies.protocol_base import Usage
from swell.cluster.api.pooling.convert import Pairs
from swell.cluster.api.pooling.protocol import (
    Classification,
    ClassificationList,
    ClassifyRequest,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    RerankedDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreList,
    ScoreRequest,
)
from swell.cluster.client.requests.outputs import RequestOutput
from swell.cluster.client.requests.pooling_outputs import cosines, float_values


class EmbeddingWriter(AnswerWriter):
    operation = "embeddings"

    def __init__(self, id: str, model: str, body: EmbeddingRequest) -> None:
        super().__init__(id, model, include_timings=body.include_timings)
        self._is_base64 = body.encoding_format == "base64"

    def full_response(self, outputs: list[RequestOutput], usage: Usage) -> msgspec.Struct:
        return EmbeddingList(
            id=self.id,
            created=self.created,
            model=self.model,
            data=[
                Embedding(index=index, embedding=self._shown(output.outputs[0].pooled))
                for index, output in enumerate(outputs)
            ],
            usage=usage,
            timings=self.timings(),
        )

    def _shown(self, pooled: bytes) -> list[float] | str:
        return base64.b64encode(pooled).decode() if self._is_base64 else float_values(pooled)


class ClassificationWriter(AnswerWriter):
    operation = "classify"

    def __init__(self, id: str, model: str, body: ClassifyRequest, labels: tuple[str, ...]) -> None:
        super().__init__(id, model, include_timings=body.include_timings)
        self._labels = labels

    def full_response(self, outputs: list[RequestOutput], usage: Usage) -> msgspec.Struct:
        return ClassificationList(
            id=self.id,
            created=self.created,
            model=self.model,
            data=[
                self._classification(index, float_values(output.outputs[0].pooled))
                for index, output in enumerate(outputs)
            ],
            usage=usage,
            timings=self.timings(),
        )

    def _classification(self, index: int, values: list[float]) -> Classification:
        label = self._labels[values.index(max(values))]
        return Classification(index=index, label=label, probs=values, num_classes=len(values))


class ScoreWriter(AnswerWriter):
    """Writes one score for each pair: the score of the model, or the cosine of the two
    embeddings."""

    operation = "score"

    def __init__(
        self, id: str, model: str, body: ScoreRequest | RerankRequest, pairs: Pairs, *, embeds: bool
    ) -> None:
        super().__init__(id, model, include_timings=body.include_timings)
        self._pairs = pairs
        self._embeds = embeds

    def full_response(self, outputs: list[RequestOutput], usage: Usage) -> msgspec.Struct:
        scores = self.scores(outputs)
        return ScoreList(
            id=self.id,
            created=self.created,
            model=self.model,
            data=[Score(index=index, score=score) for index, score in enumerate(scores)],
            usage=usage,
            timings=self.timings(),
        )

    def scores(self, outputs: list[RequestOutput]) -> list[float]:
        """Returns one score for each pair."""
        vectors = [float_values(output.outputs[0].pooled) for output in outputs]
        return (
            cosines(vectors, len(self._pairs.firsts)) if self._embeds else [v[0] for v in vectors]
        )


class RerankWriter(ScoreWriter):
    operation = "rerank"

    def __init__(
        self, id: str, model: str, body: RerankRequest, pairs: Pairs, *, embeds: bool
    ) -> None:
        super().__init__(id, model, body, pairs, embeds=embeds)
        self._top_n = body.top_n or None
        self._shows_documents = body.return_documents is not False

    def full_response(self, outputs: list[RequestOutput], usage: Usage) -> msgspec.Struct:
        scores, documents = self.scores(outputs), self._pairs.seconds
        results = [
            RerankResult(index=index, relevance_score=score)
            for index, score in sorted(enumerate(scores), key=lambda one: -one[1])[: self._top_n]
        ]
        for result in results if self._shows_documents else ():
            result.document = RerankedDocument(text=documents[result.index])
        return RerankResponse(
            id=self.id, model=self.model, results=results, usage=usage, timings=self.timings()
        )
