"""A body of `/v1/completions` to a `GenerationRequest`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swell.cluster.api.completions.protocol import CompletionRequest
from swell.cluster.text.generation_request import GenerationRequest, split_prompts


def to_generation_request(
    body: CompletionRequest, defaults: Mapping[str, Any]
) -> GenerationRequest:
    """Of a checked body. `defaults`: the model's, for fields of `SamplingParams` that the body
    leaves out. Raises `BadRequest`."""
    params = body.sampling_params(defaults)
    structured = params.structured_outputs is not None
    return GenerationRequest(
        prompt=split_prompts(body.prompt),
        params=params,
        structured_outputs_field=body.structured_outputs_field if structured else None,
        tokenize_options=body.tokenize_options(add_special_tokens=True),
        echo=bool(body.echo),
        stream=bool(body.stream),
        priority=body.priority or 0,
        cache_salt=body.cache_salt,
        data_parallel_rank=body.data_parallel_rank,
    )
