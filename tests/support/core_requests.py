"""Engine requests that tests build from sampling parameters, without a tokenizer."""

from __future__ import annotations

from typing import Any

from swell.cluster.text.params.sampling_params import (
    SamplingParams,
    internal_request_id,
    sampler_params,
)
from swell.engine.wire import EngineCoreRequest


def core_request(
    params: SamplingParams,
    child_index: int = 0,
    *,
    external_req_id: str = "r",
    bad_words: list[list[int]] | None = None,
    eos_token_ids: list[int] | None = None,
    **fields: Any,
) -> EngineCoreRequest:
    """Returns the request of one child, as `InputProcessor` makes it. `fields` are further fields
    of the request; without them the prompt has one token."""
    fields = {"prompt_token_ids": [1], "max_tokens": 99, **fields}
    return EngineCoreRequest(
        request_id=internal_request_id(external_req_id),
        sampler=sampler_params(params, child_index, bad_words),
        min_tokens=params.min_tokens,
        eos_token_ids=[] if params.ignore_eos else eos_token_ids or [],
        stop_token_ids=params.stop_token_ids,
        external_req_id=external_req_id,
        skip_prefix_cache=params.prompt_logprobs is not None,
        **fields,
    )
