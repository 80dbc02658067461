"""The outputs of `LLM` for requests that pool, in the form of vLLM's."""

from __future__ import annotations

import sys
from array import array
from operator import mul

import msgspec

from swell.cluster.client.outputs import RequestOutput


class EmbeddingOutput(msgspec.Struct):
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


class ClassificationOutput(msgspec.Struct):
    probs: list[float]
    """Of every class, in the order of their numbers."""

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ScoringOutput(msgspec.Struct):
    score: float


class _PoolingRequestOutput(msgspec.Struct, kw_only=True):
    request_id: str
    prompt_token_ids: list[int]
    """Of a score the tokens of both texts."""
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(_PoolingRequestOutput, kw_only=True):
    outputs: EmbeddingOutput


class ClassificationRequestOutput(_PoolingRequestOutput, kw_only=True):
    outputs: ClassificationOutput


class ScoringRequestOutput(_PoolingRequestOutput, kw_only=True):
    outputs: ScoringOutput


def vector_of(output: RequestOutput) -> list[float]:
    """The vector of an answer. Raises RuntimeError with the reason where there is none."""
    (answer,) = output.outputs
    if not answer.pooled:
        raise RuntimeError(f"request {output.request_id}: {answer.stop_reason}")
    return float_values(answer.pooled)


def float_values(pooled: bytes) -> list[float]:
    """The values of a vector."""
    values = array("f", pooled)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def cosines(vectors: list[list[float]], num_firsts: int) -> list[float]:
    """Of normalized vectors, the first ones with those behind them: each, or the only one with
    all. What rounding adds is taken off: none is above 1."""
    firsts, seconds = vectors[:num_firsts], vectors[num_firsts:]
    pairs = zip(firsts * (len(seconds) // num_firsts), seconds, strict=True)
    return [max(-1.0, min(sum(map(mul, first, second)), 1.0)) for first, second in pairs]
