"""The outputs of `LLM` for pooling requests, in the form of vLLM's."""

from __future__ import annotations

import sys
from array import array
from operator import mul

import msgspec

from swell.cluster.client.requests.outputs import RequestOutput


class EmbeddingOutput(msgspec.Struct):
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


class ClassificationOutput(msgspec.Struct):
    probs: list[float]
    """Probabilities of all classes, in the order of their numbers."""

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ScoringOutput(msgspec.Struct):
    score: float


class _PoolingRequestOutput(msgspec.Struct, kw_only=True):
    request_id: str
    prompt_token_ids: list[int]
    """The token ids of the prompt; for a score, of both texts."""
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(_PoolingRequestOutput, kw_only=True):
    outputs: EmbeddingOutput


class ClassificationRequestOutput(_PoolingRequestOutput, kw_only=True):
    outputs: ClassificationOutput


class ScoringRequestOutput(_PoolingRequestOutput, kw_only=True):
    outputs: ScoringOutput


def vector_of(output: RequestOutput) -> list[float]:
    """Returns the vector of an answer. Raises RuntimeError with the reason if there is none."""
    (answer,) = output.outputs
    if not answer.pooled:
        raise RuntimeError(f"request {output.request_id}: {answer.stop_reason}")
    return float_values(answer.pooled)


def float_values(pooled: bytes) -> list[float]:
    """Decodes the float32 values of a vector."""
    values = array("f", pooled)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def cosines(vectors: list[list[float]], num_firsts: int) -> list[float]:
    """Returns the cosine similarity of pairs of normalized vectors: the `num_firsts` first ones
    with the rest, pair by pair, or the only first one with each of the rest. Clamps each to [-1,
    1], because of rounding errors."""
    firsts, seconds = vectors[:num_firsts], vectors[num_firsts:]
    pairs = zip(firsts * (len(seconds) // num_firsts), seconds, strict=True)
    return [max(-1.0, min(sum(map(mul, first, second)), 1.0)) for first, second in pairs]
