"""Root-mean-square and layer normalization. Every rank has the full weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from swell.kernels.norm import add_rms_norm, layer_norm, rms_norm
from swell.worker.layers.weight_shard import WeightShard, empty_parameter, replicated_shard


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> [..., size]"""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (norm(x + residual), x + residual), all [T, size]."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        yield replicated_shard(f"{name}.weight", self.weight)


class OffsetRMSNorm(RMSNorm):
    """`x / sqrt(mean(x^2) + eps) * (1 + weight)`, the product in float32, as in gemma. The
    parameter is `1 + weight`."""

    parameter_dtype = torch.float32

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        for shard in super().weight_shards(name):
            yield replace(shard, offset=1.0)


class LayerNorm(nn.Module):
    """`(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension."""

    bias: nn.Parameter | None

    def __init__(self, size: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.bias = empty_parameter(size) if bias else None
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [..., size] -> norm(x), or norm(x + residual), [..., size]"""
        return layer_norm(x, self.weight, self.bias, self.eps, residual)

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        yield replicated_shard(f"{name}.weight", self.weight)
        if self.bias is not None:
            yield replicated_shard(f"{name}.bias", self.bias)
