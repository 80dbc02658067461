"""Request and response bodies of `/v1/embeddings` (as in OpenAI's API), `/classify` and `/v1/score`
(as in vLLM), and `/v1/rerank` (as in Jina's and Cohere's APIs)."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from swell.cluster.api.bodies.protocol_base import Body, Usage
from swell.cluster.api.bodies.sampling_fields import check_routing
from swell.cluster.api.bodies.timings import IncludeTimings, Timings
from swell.cluster.text.schema.known_fields import EMBEDDING, SCORING
from swell.cluster.text.schema.request_body import RequestBody

Texts = str | list[str | int | list[int]]
"""A text, texts, token ids, or lists of token ids."""


class PoolingBody(RequestBody, kw_only=True):
    """The fields that all pooling requests share."""

    model: str | None = None
    """None: the model that is served."""
    truncate_prompt_tokens: int | None = None
    """How many tokens of a longer text or pair are kept; -1: as many as fit."""
    truncation_side: Literal["left", "right"] | None = None
    """The side that is cut off; right (default): the first tokens are kept."""
    truncate: bool | Literal["NONE", "START", "END", "none", "start", "end"] | None = None
    """The side at which a longer text is cut to the tokens that fit; true: the end; null:
    `serve.truncate_prompts` decides."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own special tokens (default: true)."""
    priority: int | None = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    include_timings: IncludeTimings = None
    user: Any = None
    """Does not change the answer."""

    POOLS = True
    ECOSYSTEM = SCORING

    def check(self) -> None:
        self.refuse_unsupported()
        check_routing(self.cache_salt, self.data_parallel_rank, self.priority)


class EmbeddingRequest(PoolingBody, kw_only=True):
    input: Texts
    encoding_format: Literal["float", "base64"] | None = None
    """base64: the vector's float32 values (little-endian) in base64."""
    dimensions: int | None = None
    """Keep only this many values, the first ones. A normalized vector is normalized after the
    cut."""
    normalize: bool | None = None
    """Whether vectors are normalized to length 1; None: as the model's files say."""
    prompt_name: str | None = None
    """The name of the model's prompt that is prepended to each text."""
    input_type: str | None = None
    """The role of the texts, such as query or document (`INPUT_TYPES`). The model's prompt for this
    role is prepended to each text, if the model has one."""

    ECOSYSTEM = EMBEDDING


class ClassifyRequest(PoolingBody, kw_only=True):
    input: Texts
    use_activation: bool | None = None
    """false: return scores instead of probabilities."""


class ScoreRequest(PoolingBody, kw_only=True):
    """Scores one text against each of several, or the pairs of two lists of equal length."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    """Another name of `text_1`."""
    documents: str | list[str] | None = None
    """Another name of `text_2`."""
    use_activation: bool | None = None
    """false: return the score before its activation."""


class RerankDocument(RequestBody, kw_only=True):
    text: str


class RerankRequest(PoolingBody, kw_only=True):
    query: str
    documents: list[str | RerankDocument]
    top_n: int | None = None
    """The maximum number of results; null or 0: all."""
    return_documents: bool | None = None
    """Whether results contain their documents (default: true)."""
    use_activation: bool | None = None
    """false: return scores before their activation."""


class Embedding(Body, kw_only=True):
    index: int
    object: str = "embedding"
    embedding: list[float] | str


class EmbeddingList(Body, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Embedding]
    usage: Usage
    timings: Timings | UnsetType = UNSET


class Classification(Body, kw_only=True):
    index: int
    label: str
    probs: list[float]
    """The probability of each class, by class index."""
    num_classes: int


class ClassificationList(Body, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Classification]
    usage: Usage
    timings: Timings | UnsetType = UNSET


class Score(Body, kw_only=True):
    index: int
    object: str = "score"
    score: float


class ScoreList(Body, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: Usage
    timings: Timings | UnsetType = UNSET


class RerankedDocument(Body, kw_only=True):
    text: str


class RerankResult(Body, kw_only=True):
    index: int
    """The index of the document in the request."""
    relevance_score: float
    document: RerankedDocument | UnsetType = UNSET


class RerankResponse(Body, kw_only=True):
    """The results, best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: Usage
    timings: Timings | UnsetType = UNSET
