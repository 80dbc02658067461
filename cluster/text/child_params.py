"""Several answers to one prompt: how many a request may have, and the sampling parameters of each.

Each answer is the work of a child: a request of its own to the engines.
"""

from __future__ import annotations

import msgspec

from swell.cluster.text.sampling_params import SEED_BITS, BadRequest, SamplingParams, shown


def num_children(params: SamplingParams) -> int:
    return params.best_of or params.n


def check_num_children(prompts: int, params: SamplingParams, limit: int) -> None:
    """Refuse a request for too many answers: each is a request of its own to the engines, and all
    begin at once. Raises `BadRequest`."""
    each, field = (params.n, "n") if params.best_of is None else (params.best_of, "best_of")
    if isinstance(each, int) and prompts * each > limit:
        raise BadRequest(
            f"{prompts} prompts with {field}={shown(each)} are {shown(prompts * each)} answers to "
            f"draw; at most serve.max_children={limit} are allowed in one request",
            field if each > 1 else "prompt",
        )


def child_sampling_params(params: SamplingParams) -> list[SamplingParams]:
    """The parameters of each child: child i samples with `seed + i`, within 63 bits, or, without a
    seed, with a random one of its own that is chosen later. Children that will be ranked return log
    probabilities."""
    if params.n == 1 and params.best_of is None:
        return [params]
    count = num_children(params)
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
