"""Converts a body of `/v1/completions` to a `GenerationRequest`. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swell.cluster.api.completions.protocol import CompletionRequest
from swell.cluster.text.errors import bad_value
from swell.cluster.text.params.validate_params import check_length
from swell.cluster.text.prompt.generation_request import (
    MAX_PROMPTS,
    GenerationRequest,
    split_prompts,
)
from swell.cluster.text.prompt.prompt_embeds import read_prompt_embeds


def to_generation_request(
    body: CompletionRequest, defaults: Mapping[str, Any]
) -> GenerationRequest:
    """Converts a checked body. `defaults` are the model's, for fields of `SamplingParams` that the
    body leaves out. Raises `BadRequest`."""
    own: dict[str, Any] = {"add_special_tokens": True, "echo": bool(body.echo)}
    if body.prompt_embeds is not None:
        texts = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds
        if not texts:
            raise bad_value("prompt_embeds", texts, "is empty; send at least one prompt")
        check_length("prompt_embeds", texts, "prompts", MAX_PROMPTS)
        own["embeds"] = [read_prompt_embeds(text, "prompt_embeds") for text in texts]
        # The model's default penalty applies to tokens, but the prompt consists of embeddings.
        defaults = {name: defaults[name] for name in defaults if name != "repetition_penalty"}
        return body.generation_request([], defaults, prompt_field="prompt_embeds", **own)
    assert body.prompt is not None, "`check` requires a prompt"
    return body.generation_request(split_prompts(body.prompt), defaults, **own)
