"""Log probabilities of tokens, and which tokens are the most likely."""

from __future__ import annotations

from torch import Tensor

from swell.kernels import backends


def rank_tokens(logits: Tensor, token_ids: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """logits [N, V] float32, token_ids [N] int64 -> (indices [N, 2 + top] int64, logprobs
    [N, 1 + top] float32); a `top` above V counts as V.

    A row of `indices` is the token's rank, the token, and the `top` most likely ones, best first;
    `logprobs` are those of the tokens.

        logprob(t) = logit(t) - log(sum(exp(logits)))        rank(t) = 1 + number of larger logits

    The order of equal logits is up to the backend. If one of a row's logits is NaN or +inf, or all
    are -inf, all its log probabilities are NaN. Backends: reference, cpu.
    """
    return backends.get("logprobs", logits.device.type).rank_tokens(logits, token_ids, top)
