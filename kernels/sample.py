"""Sampling tokens from logits with noise that is a function of seed and position alone.

The order of the filters: temperature, min_p, top_k, top_p; then the inverse of the cumulative
distribution, in token order, at u. A row's token does not depend on the other rows.
"""

from __future__ import annotations

from torch import Tensor

from swell.kernels import backends


def uniform_noise(seeds: Tensor, positions: Tensor) -> Tensor:
    """seeds [N] int64, positions [N] int64 -> [N] float64 in [0, 1), the same on every device.

    53 bits of mix(mix(seed + g) + (position + 1) * g), where mix is the finalizer and g the
    increment of SplitMix64 (Steele, Lea, Flood 2014, doi:10.1145/2660193.2660195; constants as
    in https://prng.di.unimi.it/splitmix64.c). Backends: reference, cpu.
    """
    return backends.get("sample", seeds.device.type).uniform_noise(seeds, positions)


def greedy_sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [N, V] -> the most likely tokens [N] int64, and their logits [N] float32.

    Where one of a row's logits is NaN, so is the latter, and the token is any.
    Backends: reference, cpu.
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
    """One token per row, [N] int64, and the largest logit of each, [N] float32.

    The largest logit is finite if, and only if, the row can be sampled: it is NaN where one of the
    row's logits is, and infinite where one is +inf or all are -inf. The token is any then.

    logits [N, V] float32 (not changed); temperature, top_p, min_p [N] float32; top_k [N] int64;
    u [N] float64 in [0, 1).

    A row of temperature 0 takes its most likely token. min_p keeps tokens with at least min_p
    times the largest probability; top_k > 0 keeps the k most likely; top_p < 1 keeps, of what is
    left and renormalized, the smallest set of most likely tokens that holds top_p. Equal logits
    are ranked by token id, and one token is always kept. A token of logit -inf is never sampled,
    nor is one with (logit - max) / temperature < -87, whose weight beside the largest, 1, would
    underflow in float32: at u = 0 even such a weight would be the first above the target.

    `any_top_k_or_p`: whether a row of the batch uses top_k or top_p; if False, nothing is sorted.
    The caller knows it without reading the device. Backends: reference, cpu.
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
