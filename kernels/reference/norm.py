"""RMS norm in plain torch, with the same operations as transformers' LlamaRMSNorm; and layer
norm."""

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


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor:
    """See `swell.kernels.norm.layer_norm`."""
    total = x if residual is None else x + residual
    return torch.nn.functional.layer_norm(total, (total.shape[-1],), weight, bias, eps)
