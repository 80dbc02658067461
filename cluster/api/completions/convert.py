"""A body of `/v1/completions` to a `GenerationRequest`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swell.cluster.api.completions.protocol import CompletionRequest
from swell.cluster.text.generation_request import GenerationRequest, split_prompts


def to_generation_request(
    body: CompletionRequest, defaults: Mapping[str, Any]
) -> GenerationRequest:
    """The common form of a checked body. `defaults`: the model's, for fields of `SamplingParams`
    that the body leaves out. Raises `BadRequest`."""
    prompts = split_prompts(body.prompt)
    return body.generation_request(prompts, defaults, add_special_tokens=True, echo=bool(body.echo))
