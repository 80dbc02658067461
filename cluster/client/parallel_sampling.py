"""Several answers to one prompt: children that are drawn apart, and how they become one answer.

A child is an ordinary request of its own; all children of an answer share its external id. Usage
counts the prompt once, and the tokens of every answer that was drawn, also of those that `best`
leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from swell.cluster.client.outputs import CompletionOutput, RequestOutput, RequestOutputKind
from swell.cluster.text.sampling_params import SEED_BITS, BadRequest, SamplingParams, shown


def check_num_children(prompts: int, params: SamplingParams, limit: int) -> None:
    """Refuse a request for more answers than one may draw: each is a request of its own to the
    engines, and all begin at once. Raises `BadRequest`."""
    each, field = (params.n, "n") if params.best_of is None else (params.best_of, "best_of")
    if isinstance(each, int) and prompts * each > limit:
        raise BadRequest(
            f"{prompts} prompts with {field}={shown(each)} are {shown(prompts * each)} answers to "
            f"draw; at most serve.max_children={limit} are allowed in one request",
            field if each > 1 else "prompt",
        )


def children(params: SamplingParams) -> list[SamplingParams]:
    """What each child draws with: child i with `seed + i`, within 63 bits, or, where no seed was
    given, with one of its own that is drawn later. Children that will be ranked tell log
    probabilities."""
    count = _num_children(params)
    ranked = count > params.n and params.logprobs is None
    return [
        msgspec.structs.replace(
            params,
            n=1,
            best_of=None,
            seed=None if params.seed is None else (params.seed + i) % 2**SEED_BITS,
            logprobs=0 if ranked else params.logprobs,
        )
        for i in range(count)
    ]


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """What children of one prompt gave, in any order, as one output: their answers by index. The
    prompt's cached tokens are those that no child had to compute."""
    parts = [part for output in outputs for part in output.outputs]
    return msgspec.structs.replace(
        outputs[0],
        outputs=sorted(parts, key=lambda part: part.index),
        finished=all(output.finished for output in outputs),
        num_cached_tokens=min(output.num_cached_tokens for output in outputs),
    )


def best(output: RequestOutput, params: SamplingParams) -> RequestOutput:
    """The `n` answers with the largest mean log probability a token (as OpenAI defines `best_of`),
    best first, and numbered so; of equal ones the first drawn. Log probabilities that only the
    ranking asked for are left out."""
    ranked = sorted(output.outputs, key=_mean_logprob, reverse=True)
    kept = [
        msgspec.structs.replace(part, index=index) for index, part in enumerate(ranked[: params.n])
    ]
    if params.logprobs is None:
        for part in kept:
            part.logprobs = part.cumulative_logprob = None
    return msgspec.structs.replace(output, outputs=kept)


class ParentRequest:
    """One answer while its children are on their way.

    Each output is told according to `kind`: DELTA passes on what is new of one child, CUMULATIVE
    tells all of every child that has begun, FINAL_ONLY all of all, once. Where answers are ranked
    nothing is told before the last is there, whatever the kind.

    If one child fails, the answer has failed: its error is the last output, and what the others
    give later is nobody's. The caller ends those by their external id.
    """

    def __init__(self, params: SamplingParams, kind: RequestOutputKind) -> None:
        self._params = params
        self._kind = kind
        self._is_best_of = _num_children(params) > params.n
        self._unfinished = _num_children(params)
        self._outputs: dict[int, RequestOutput] = {}
        """All that each child gave; of deltas that were passed on, the last."""

    @property
    def num_output_tokens(self) -> int:
        """Drawn so far by all children."""
        return sum(output.outputs[0].num_output_tokens for output in self._outputs.values())

    def add(self, output: RequestOutput) -> RequestOutput | None:
        """Take what a child gives, one answer whose index is the child's; what the asker gets for
        it."""
        if not self._unfinished:
            return None
        (part,) = output.outputs
        if part.finish_reason == "error":
            self._unfinished = 0
            return output
        self._unfinished -= output.finished
        finished = not self._unfinished
        if self._kind == RequestOutputKind.DELTA and not self._is_best_of:
            self._outputs[part.index] = output
            return msgspec.structs.replace(output, finished=finished)
        self._merge(part.index, output)
        if not finished and (self._is_best_of or self._kind == RequestOutputKind.FINAL_ONLY):
            return None
        whole = merge_outputs(list(self._outputs.values()))
        whole.finished = finished
        return best(whole, self._params) if self._is_best_of else whole

    def _merge(self, index: int, output: RequestOutput) -> None:
        if index in self._outputs and self._kind == RequestOutputKind.DELTA:
            self._outputs[index].add(output, aggregate=True)
        else:
            self._outputs[index] = output


def _num_children(params: SamplingParams) -> int:
    return params.best_of or params.n


def _mean_logprob(part: CompletionOutput) -> float:
    """An answer that was ended before its first token comes last."""
    assert part.cumulative_logprob is not None, "ranked answers tell their log probabilities"
    if not part.token_ids:
        return -float("inf")
    return part.cumulative_logprob / len(part.token_ids)
