"""Merges the outputs of the requests for one prompt into one `RequestOutput`. Pure.

Each answer to a prompt is sampled by a child: an ordinary request (see `sampler_params`). Usage
counts the prompt once, and the tokens of every sampled answer, including those that
`select_best_of` leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from swell.cluster.client.requests.outputs import CompletionOutput, RequestOutput
from swell.cluster.text.params.sampling_params import SamplingParams


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Merges the outputs of the children of one prompt, in any order, into one output with the
    answers sorted by index. The number of cached prompt tokens is the minimum over the children."""
    completions = [completion for output in outputs for completion in output.outputs]
    return msgspec.structs.replace(
        outputs[0],
        outputs=sorted(completions, key=lambda completion: completion.index),
        finished=all(output.finished for output in outputs),
        num_cached_tokens=min(output.num_cached_tokens for output in outputs),
    )


def select_best_of(output: RequestOutput, params: SamplingParams) -> RequestOutput:
    """Returns the `n` answers with the largest mean log probability per token (OpenAI's definition
    of `best_of`), best first, with new indices. If two are equal, the earlier child comes first.
    Log probabilities that only the ranking needed are removed."""
    ranked = sorted(output.outputs, key=_mean_logprob, reverse=True)
    best = [
        msgspec.structs.replace(completion, index=index)
        for index, completion in enumerate(ranked[: params.n])
    ]
    if params.logprobs is None:
        for completion in best:
            completion.logprobs = completion.cumulative_logprob = None
    return msgspec.structs.replace(output, outputs=best)


def _mean_logprob(completion: CompletionOutput) -> float:
    """Returns the mean log probability per token; an answer without tokens ranks last."""
    assert completion.cumulative_logprob is not None, "ranked answers have log probabilities"
    if not completion.token_ids:
        return -float("inf")
    return completion.cumulative_logprob / len(completion.token_ids)
