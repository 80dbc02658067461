"""RMS norm in plain torch, with the same operations as transformers' LlamaRMSNorm and
Gemma3RMSNorm; and layer norm."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `swell.kernels.norm.rms_norm`."""
    wide = x.to(torch.float32)
    mean_square = wide.pow(2).mean(-1, keepdim=True)
    normed = wide * torch.rsqrt(mean_square + eps)
    if weight.dtype == torch.float32:
        return (weight * normed).to(x.dtype)
    return weight * normed.to(x.dtype)


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
