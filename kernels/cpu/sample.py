"""Noise and sampling compiled from `sample.cpp`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from swell.kernels.cpu.build import library
from swell.kernels.reference import sample as reference

_greedy, _sample, _noise = (
    getattr(library(), f"swell_{name}") for name in ("greedy", "sample", "noise")
)
_greedy.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_void_p] * 2]
_sample.argtypes = [*[ctypes.c_void_p] * 7, *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 2]
_noise.argtypes = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
_greedy.restype = _sample.restype = _noise.restype = None
_Strides = ctypes.c_int64 * 6


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
        logits.data_ptr(), *logits.shape, logits.stride(0), out.data_ptr(), max_logits.data_ptr()
    )
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
