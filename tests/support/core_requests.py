"""Engine requests that tests build from sampling parameters, and the outputs of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from swell.cluster.client.requests.output_processor import OutputProcessor
from swell.cluster.client.requests.outputs import RequestOutput
from swell.cluster.client.requests.stats import FinishedRequestStats
from swell.cluster.text.params.sampling_params import (
    SamplingParams,
    internal_request_id,
    sampler_params,
)
from swell.engine.wire import EngineCoreOutput, EngineCoreRequest


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


def outputs_after(
    processor: OutputProcessor, outputs: Iterable[EngineCoreOutput]
) -> list[RequestOutput]:
    """Processes outputs of engines, and returns what the queue of each request then holds."""
    states = [*processor.request_states.values()]
    processor.process_outputs(outputs)
    return [output for state in states if (output := state.queue.get_nowait()) is not None]


def finished_stats(
    reason: str = "stop", num_output_tokens: int = 3, **times_s: float
) -> FinishedRequestStats:
    """Returns statistics in which only the given times are known."""
    unknown = dict.fromkeys(("queue_s", "prefill_s", "decode_s"))
    return FinishedRequestStats(
        finish_reason=reason,
        num_prompt_tokens=2,
        num_output_tokens=num_output_tokens,
        e2e_s=7.0,
        **{**unknown, **times_s},
    )
