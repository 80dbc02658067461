"""Root-mean-square normalization; every rank has the full weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from swell.kernels.norm import add_rms_norm, rms_norm
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
        """(norm(x + residual), x + residual), all [T, size]"""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        yield replicated_shard(f"{name}.weight", self.weight)
