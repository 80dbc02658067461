"""Parallel sampling: merges the outputs of child requests for one prompt into one `RequestOutput`.

A child is an ordinary request (see `sampler_params`). Usage counts the prompt once, and the
tokens of every sampled answer, including those that `select_best_of` leaves out. The HTTP server
and `LLM` both use `ParentRequest`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from swell.cluster.client.requests.outputs import CompletionOutput, RequestOutput, RequestOutputKind
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


class ParentRequest:
    """All answers to one prompt while its children run.

    `add` returns outputs according to `kind`: with DELTA the new part of one child, with CUMULATIVE
    the answers so far of every child that has begun, with FINAL_ONLY all answers, once. If answers
    are ranked, it returns nothing before the last one is complete, for every kind.

    If one child fails, the request has failed: the child's error is the last output, and later
    outputs of other children are dropped. The caller aborts those children.
    """

    def __init__(self, params: SamplingParams, kind: RequestOutputKind) -> None:
        self._params = params
        self._is_delta = kind == RequestOutputKind.DELTA
        self._is_final_only = kind == RequestOutputKind.FINAL_ONLY
        self._is_best_of = params.num_children > params.n
        self._unfinished = params.num_children
        self._outputs: dict[int, RequestOutput] = {}
        """All output of each child; with deltas that are passed on, only the last one."""

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens sampled so far by all children."""
        return sum(output.outputs[0].num_output_tokens for output in self._outputs.values())

    def add(self, output: RequestOutput) -> RequestOutput | None:
        """Adds a child's output, which has one answer with the child's index, and returns the
        output for the client, or None."""
        if not self._unfinished:
            return None
        (completion,) = output.outputs
        if completion.finish_reason in ("error", "invalid"):
            self._unfinished = 0
            return output
        self._unfinished -= output.finished
        finished = not self._unfinished
        if self._is_delta and not self._is_best_of:
            self._outputs[completion.index] = output
            if output.finished == finished:
                return output
            return msgspec.structs.replace(output, finished=finished)
        known = self._outputs.get(completion.index)
        if known is not None and self._is_delta:
            known.add(output, aggregate=True)
        else:
            self._outputs[completion.index] = output
        if not finished and (self._is_best_of or self._is_final_only):
            return None
        whole = merge_outputs(list(self._outputs.values()))
        whole.finished = finished
        return select_best_of(whole, self._params) if self._is_best_of else whole


def _mean_logprob(completion: CompletionOutput) -> float:
    """Returns the mean log probability per token; an answer without tokens ranks last."""
    assert completion.cumulative_logprob is not None, "ranked answers have log probabilities"
    if not completion.token_ids:
        return -float("inf")
    return completion.cumulative_logprob / len(completion.token_ids)
