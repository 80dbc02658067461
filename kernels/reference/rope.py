"""Rotary embedding in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.rope.apply_rope`."""
    half = cos.shape[-1]
    wide_cos, wide_sin = cos.float().unsqueeze(1), sin.float().unsqueeze(1)  # [T, 1, half]
    for x in (q, k):
        a, b = x[..., :half].float(), x[..., half : 2 * half].float()
        rotated = torch.cat((a * wide_cos - b * wide_sin, b * wide_cos + a * wide_sin), dim=-1)
        x[..., : 2 * half] = rotated.to(x.dtype)
    return q, k
