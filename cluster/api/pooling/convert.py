"""Converts bodies of pooling requests to a `PoolingRequest`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from swell.cluster.api.pooling.protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingBody,
    RerankRequest,
    ScoreRequest,
)
from swell.cluster.text.errors import BadRequest, bad_value
from swell.cluster.text.prompt.generation_request import split_prompts
from swell.cluster.text.prompt.pooling_processor import Input, PoolingRequest, Task
from swell.cluster.text.prompt.truncation import TokenizeOptions, Truncation
from swell.configs.serve import TruncatePrompts

_TRUNCATE: dict[str, TruncatePrompts] = {
    "none": "none",
    "start": "start",
    "end": "end",
    "false": "none",
    "true": "end",
}
"""A value of `truncate`, as lower-case text -> its meaning."""


class Pairs(NamedTuple):
    """The pairs of texts to score. `firsts` holds one text for all pairs, or one for each of
    `seconds`."""

    firsts: list[str]
    seconds: list[str]
    fields: tuple[str, str]
    """The names of the two fields, for error messages."""


def embedding_request(body: EmbeddingRequest) -> PoolingRequest:
    """Returns a request for one vector for each text."""
    inputs = split_prompts(body.input, "input")
    return _request(
        body,
        "embed",
        inputs,
        _fields("input", len(inputs)),
        activates=body.normalize,
        dimensions=body.dimensions,
        prompt_name=body.prompt_name,
        input_type=_input_type(body),
    )


def classify_request(body: ClassifyRequest) -> PoolingRequest:
    """Returns a request for the scores of all classes for each text."""
    inputs = split_prompts(body.input, "input")
    fields = _fields("input", len(inputs))
    return _request(body, "classify", inputs, fields, activates=body.use_activation)


def score_pairs(body: ScoreRequest) -> Pairs:
    """Returns the pairs of `/v1/score`. Raises `BadRequest`."""
    names = [_one_of(body, names) for names in (("text_1", "queries"), ("text_2", "documents"))]
    firsts, seconds = (_texts(name, getattr(body, name)) for name in names)
    if len(firsts) not in (1, len(seconds)):
        raise BadRequest(
            f"{names[0]} has {len(firsts)} texts and {names[1]} has {len(seconds)}; send one text "
            f"in {names[0]}, or the same number as in {names[1]}",
            names[0],
        )
    return Pairs(firsts, seconds, (names[0], names[1]))


def rerank_pairs(body: RerankRequest) -> Pairs:
    """Returns the query paired with each document. Raises `BadRequest`."""
    documents = [one if isinstance(one, str) else one.text for one in body.documents]
    if not documents:
        raise bad_value("documents", documents, "is empty; at least one document is needed")
    if body.top_n is not None and body.top_n < 0:
        raise bad_value("top_n", body.top_n, "must be at least 0; 0 returns all documents")
    return Pairs([body.query], documents, ("query", "documents"))


def score_request(
    body: ScoreRequest | RerankRequest, pairs: Pairs, *, embeds: bool
) -> PoolingRequest:
    """Returns a request that scores the pairs. With `embeds` the model returns a vector for each
    text, those of `pairs.firsts` first; otherwise it returns one score for each pair."""
    firsts, seconds = pairs.firsts, pairs.seconds
    first_fields, fields = (
        _fields(name, len(texts))
        for name, texts in zip(pairs.fields, (firsts, seconds), strict=True)
    )
    inputs: Sequence[Input]
    if embeds:
        inputs, fields, first_fields = [*firsts, *seconds], [*first_fields, *fields], []
    else:
        times = len(seconds) // len(firsts)
        inputs, first_fields = list(zip(firsts * times, seconds, strict=True)), first_fields * times
    return _request(
        body,
        "score",
        inputs,
        fields,
        first_fields=first_fields,
        activates=body.use_activation,
    )


def _request(
    body: PoolingBody, task: Task, inputs: Sequence[Input], fields: Sequence[str], **more: Any
) -> PoolingRequest:
    return PoolingRequest(
        task=task,
        inputs=inputs,
        fields=fields,
        tokenize_options=_tokenize_options(body),
        truncate=_truncate(body),
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        data_parallel_rank=body.data_parallel_rank,
        **more,
    )


def _tokenize_options(body: PoolingBody) -> TokenizeOptions:
    truncation = None
    if body.truncate_prompt_tokens is not None:
        side = body.truncation_side or "right"
        truncation = Truncation(body.truncate_prompt_tokens, side, reserved_tokens=0)
    elif body.truncation_side is not None:
        rule = "has no effect without truncate_prompt_tokens; send both"
        raise bad_value("truncation_side", body.truncation_side, rule)
    return TokenizeOptions(body.add_special_tokens is not False, truncation)


def _truncate(body: PoolingBody) -> TruncatePrompts | None:
    if body.truncate is None:
        return None
    if body.truncate_prompt_tokens is not None:
        rule = "and truncate_prompt_tokens both set the truncation; send one of them"
        raise bad_value("truncate", body.truncate, rule)
    return _TRUNCATE[str(body.truncate).lower()]


def _input_type(body: EmbeddingRequest) -> str | None:
    if body.input_type is not None and body.prompt_name is not None:
        rule = "and prompt_name both select a prompt of the model; send one of them"
        raise bad_value("input_type", body.input_type, rule)
    return body.input_type


def _fields(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}[{index}]" for index in range(count)]


def _one_of(body: ScoreRequest, names: tuple[str, str]) -> str:
    sent = [name for name in names if getattr(body, name) is not None]
    if len(sent) != 1:
        raise BadRequest(f"send either {names[0]!r} or {names[1]!r}", names[0], "missing_field")
    return sent[0]


def _texts(name: str, value: str | list[str]) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not texts:
        raise bad_value(name, texts, "is empty; at least one text is needed")
    return texts
