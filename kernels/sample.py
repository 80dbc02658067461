"""Samples tokens from logits with noise that is a function only of seed and position.

The filters are applied in this order: temperature, min_p, top_k, top_p. Then the inverse of the
cumulative distribution, in token order, is evaluated at u. A row's token does not depend on the
other rows.
"""

from __future__ import annotations

from torch import Tensor

from swell.kernels import backends
from swell.kernels.reference import sample as reference


def uniform_noise(seeds: Tensor, positions: Tensor) -> Tensor:
    """seeds [N] int64, positions [N] int64 -> [N] float64 in [0, 1), the same on every device.

    53 bits of mix(mix(seed + g) + (position + 1) * g), where mix is the finalizer and g the
    increment of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195; constants as in
    https://prng.di.unimi.it/splitmix64.c). Backends: reference, cpu, triton.
    """
    return backends.get("sample", seeds.device.type).uniform_noise(seeds, positions)


def greedy_sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [N, V] -> the most likely tokens [N] int64, and their logits [N] float32.

    If one of a row's logits is NaN, so is the returned logit, and the token is undefined. Backends:
    reference, cpu, triton.
    """
    return backends.get("sample", logits.device.type).greedy_sample(logits)


def sample_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    u: Tensor,
    *,
    any_top_k_or_p: bool = True,
) -> tuple[Tensor, Tensor]:
    """Samples one token per row, [N] int64, and returns it with the largest logit of each row, [N]
    float32.

    The largest logit is finite if, and only if, the row can be sampled: it is NaN if one of the
    row's logits is NaN, and infinite if one is +inf or all are -inf. Then the token is undefined.

    logits [N, V] float32 (not changed); temperature, top_p, min_p [N] float32; top_k [N] int64; u
    [N] float64 in [0, 1).

    A row with temperature 0 gets its most likely token. min_p keeps tokens with at least min_p
    times the largest probability; top_k > 0 keeps the k most likely; top_p < 1 keeps, among the
    remaining renormalized ones, the smallest set of most likely tokens whose total probability is
    at least top_p. Equal logits are ranked by token id, and one token is always kept. A token is
    never sampled if its logit is -inf, or if (logit - max) / temperature < -87: its weight relative
    to the largest, 1, would underflow in float32, and at u = 0 even such a weight would be the
    first above the target.

    `any_top_k_or_p`: whether a row of the batch uses top_k or top_p; if False, nothing is sorted.
    The caller knows it without reading the device. Backends: reference, cpu, triton.
    """
    return backends.get("sample", logits.device.type).sample_tokens(
        logits,
        temperature,
        top_k,
        top_p,
        min_p,
        u,
        any_top_k_or_p=any_top_k_or_p,
    )


def filter_logits(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    sampled: Tensor,
    *,
    any_top_k_or_p: bool = True,
) -> Tensor:
    """Returns the logits of the distribution from which `sample_tokens` samples, [N, V] float32:
    logits / temperature for the tokens that the filters keep, -inf for the others.

    The parameters are those of `sample_tokens`; its rows with temperature 0 stay as they are. A
    token whose weight underflows is kept here. The tokens `sampled` [N] int64 are always kept: at
    the edge of top_p the backends may round the sum of probabilities differently. Rows with NaN
    have NaN. Backends: reference.
    """
    return reference.filter_logits(
        logits, temperature, top_k, top_p, min_p, sampled, any_top_k_or_p=any_top_k_or_p
    )
