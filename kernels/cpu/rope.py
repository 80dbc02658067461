"""Rotary embedding compiled from `rope.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from swell.kernels.cpu.build import TYPES
from swell.kernels.cpu.capture.recording import INT, POINTER, Function
from swell.kernels.reference import rope as reference

_rope = Function(
    "swell_rope",
    "tokens",
    **dict.fromkeys(("x", "cos", "sin"), POINTER),
    **dict.fromkeys(("tokens", "heads", "stride", "head_dim", "half"), INT),
    **dict.fromkeys(("is_bf16", "cos_bf16"), INT),
)


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.rope.apply_rope`."""
    if not (_computed(q, q.shape[2]) and _computed(k, k.shape[2]) and cos.dtype in TYPES):
        return reference.apply_rope(q, k, cos, sin)
    cos, sin = cos.contiguous(), sin.contiguous()
    for x in (q, k):
        _rope(
            x.data_ptr(), cos.data_ptr(), sin.data_ptr(), x.shape[0], x.shape[1], x.stride(0),
            x.shape[2], cos.shape[1], x.dtype == torch.bfloat16, cos.dtype == torch.bfloat16,
            used=(x, cos, sin),
        )  # fmt: skip
    return q, k


def _computed(x: Tensor, head_dim: int) -> bool:
    return x.dtype in TYPES and x.stride(2) == 1 and x.stride(1) == head_dim
