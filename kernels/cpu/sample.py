"""Noise and sampling compiled from `sample.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from swell.kernels.cpu.capture.recording import INT, POINTER, Function, UnrecordedFunction
from swell.kernels.reference import sample as reference

_greedy = Function(
    "swell_greedy",
    "rows",
    **dict.fromkeys(("logits", "out", "max_logits"), POINTER),
    **dict.fromkeys(("rows", "vocab", "stride"), INT),
)
_sample = UnrecordedFunction("swell_sample", *[POINTER] * 7, *[INT] * 2, *[POINTER] * 2)
_noise = UnrecordedFunction("swell_noise", *[POINTER] * 2, *[INT] * 3, POINTER)
_Strides = INT * 6


def uniform_noise(seeds: Tensor, positions: Tensor) -> Tensor:
    """See `swell.kernels.sample.uniform_noise`."""
    assert seeds.dtype == positions.dtype == torch.int64 and seeds.shape == positions.shape
    count = len(seeds)
    out = torch.empty(count, dtype=torch.float64)
    _noise(
        seeds.data_ptr(), positions.data_ptr(), seeds.stride(0), positions.stride(0), count,
        out.data_ptr(),
    )  # fmt: skip
    return out


def greedy_sample(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.sample.greedy_sample`."""
    if logits.dtype != torch.float32:
        return reference.greedy_sample(logits)
    assert logits.stride(1) == 1
    out, max_logits = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
    _greedy(
        logits.data_ptr(), out.data_ptr(), max_logits.data_ptr(), *logits.shape, logits.stride(0),
        used=(logits, out, max_logits),
    )  # fmt: skip
    return out, max_logits


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
    """See `swell.kernels.sample.sample_tokens`; each row computes only what it needs."""
    assert logits.dtype == temperature.dtype == top_p.dtype == min_p.dtype == torch.float32
    assert top_k.dtype == torch.int64 and u.dtype == torch.float64 and logits.stride(1) == 1
    params = (logits, temperature, top_k, top_p, min_p, u)
    out, max_logits = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
    _sample(
        *(x.data_ptr() for x in params), _Strides(*(x.stride(0) for x in params)),
        *logits.shape, out.data_ptr(), max_logits.data_ptr(),
    )  # fmt: skip
    return out, max_logits
