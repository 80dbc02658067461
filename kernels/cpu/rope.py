"""Rotary embedding compiled from `rope.cpp`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from swell.kernels.cpu.build import TYPES, library
from swell.kernels.reference import rope as reference

_call = library().swell_rope
_call.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 5 + [ctypes.c_int] * 2
_call.restype = None


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.rope.apply_rope`."""
    if not (_computed(q, q.shape[2]) and _computed(k, k.shape[2]) and cos.dtype in TYPES):
        return reference.apply_rope(q, k, cos, sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    for x in (q, k):
        _call(
            x.data_ptr(), cos.data_ptr(), sin.data_ptr(), x.shape[0], x.shape[1], x.stride(0),
            x.shape[2], cos.shape[1], x.dtype == torch.bfloat16, cos.dtype == torch.bfloat16,
        )  # fmt: skip
    return q, k


def _computed(x: Tensor, head_dim: int) -> bool:
    return x.dtype in TYPES and x.stride(2) == 1 and x.stride(1) == head_dim
