"""RMS norm in plain torch, operation for operation as transformers' LlamaRMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `swell.kernels.norm.rms_norm`."""
    wide = x.to(torch.float32)
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(mean_square + eps)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.norm.add_rms_norm`."""
    total = x + residual
    return rms_norm(total, weight, eps), total
