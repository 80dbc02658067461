"""Noise and sampling in plain torch; the host never waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1

EXP_UNDERFLOW = -87.0
"""(logit - max) / temperature below which a token is never sampled."""


def _signed(value: int) -> int:
    """Returns the int64 with the bits of an unsigned constant."""
    return value - (1 << 64) if value >> 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (torch's own shift copies the sign)."""
    return (x >> bits) & (_MASK64 >> bits)


def _mix(z: Tensor) -> Tensor:
    """The finalizer of SplitMix64; int64 products wrap like the unsigned ones of the source."""
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def uniform_noise(seeds: Tensor, positions: Tensor) -> Tensor:
    """See `swell.kernels.sample.uniform_noise`."""
    hashed = _mix(_mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN)
    return _shift_right(hashed, 11).to(torch.float64) * 2.0**-53


def greedy_sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.sample.greedy_sample`."""
    max_logits, tokens = logits.max(dim=-1)
    return tokens, max_logits.float()


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
    """See `swell.kernels.sample.sample_tokens`."""
    greedy = temperature <= 0
    max_logits, best = logits.max(dim=-1)
    # The largest logit is 0 before the division, so that even a tiny temperature does not overflow.
    scaled = logits - max_logits[:, None]
    scaled /= torch.where(greedy, 1.0, temperature)[:, None]
    # p >= min_p * p_max in logarithms; log(0) = -inf keeps everything that does not underflow.
    least = min_p.log().clamp(EXP_UNDERFLOW, 0)
    scaled.masked_fill_(scaled < least[:, None], float("-inf"))
    if any_top_k_or_p:
        scaled = scaled.masked_fill(~_top(logits, scaled, top_k, top_p), float("-inf"))
    # float64: in a large vocabulary, a float32 sum would lose rare tokens.
    cumulative = torch.softmax(scaled, dim=-1).double().cumsum(dim=-1)
    total = cumulative[:, -1]
    # Strictly below the total, so that the first sum above it ends at a token with probability > 0.
    target = torch.minimum(u * total, torch.nextafter(total, torch.zeros_like(total)))
    sampled = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(1)
    # Only NaN logits lead past the end; an index out of range would be worse than a wrong token.
    sampled = sampled.clamp(max=logits.shape[-1] - 1)
    return torch.where(greedy, best, sampled), max_logits


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
    """See `swell.kernels.sample.filter_logits`."""
    greedy = (temperature <= 0)[:, None]
    scaled = logits / torch.where(greedy, 1.0, temperature[:, None])
    keep = scaled - scaled.amax(-1, keepdim=True) >= min_p.log()[:, None]
    if any_top_k_or_p:
        keep &= _top(logits, scaled.masked_fill(~keep, float("-inf")), top_k, top_p)
    keep |= greedy | scaled.isnan()
    keep.scatter_(1, sampled[:, None], True)
    return scaled.masked_fill_(~keep, float("-inf"))


def _top(logits: Tensor, scaled: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Returns [N, V] bool: the tokens that top_k, and then top_p, keep."""
    vocab = scaled.shape[-1]
    # Sorts by the logits themselves: scaling may make logits equal that differ by a rounding.
    token = logits.argsort(dim=-1, descending=True, stable=True)
    ranked = scaled.gather(1, token)
    limit = torch.where(top_k > 0, top_k, vocab)[:, None]
    keep = torch.arange(vocab, device=scaled.device) < limit
    probability = torch.softmax(ranked.masked_fill(~keep, float("-inf")), dim=-1).double()
    before = probability.cumsum(dim=-1) - probability
    keep &= (before < top_p[:, None]) | (top_p >= 1)[:, None]
    keep[:, 0].fill_(True)
    return torch.zeros_like(keep).scatter_(1, token, keep)
