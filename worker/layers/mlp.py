"""The feed-forward block of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import nn

from swell.kernels.activation import silu_and_mul
from swell.worker.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from swell.worker.layers.weight_shard import WeightShard
from swell.worker.mesh import Group


class FeedForward(nn.Module, ABC):
    """The feed-forward block of a layer: maps [T, hidden] to [T, hidden], each token by itself."""

    @abstractmethod
    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        """What it reads from a checkpoint in which the block is called `name`."""


class GatedMLP(FeedForward):
    """`down(silu(gate(x)) * up(x))`: gate and up are one column-parallel product, down is
    row-parallel."""

    def __init__(self, hidden: int, intermediate: int, group: Group, bias: bool = False) -> None:
        super().__init__()
        what = "intermediate_size"
        self.gate_up = MergedColumnParallelLinear(hidden, [intermediate] * 2, group, bias, what)
        self.down = RowParallelLinear(intermediate, hidden, group, bias, what=what)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]"""
        return self.down(silu_and_mul(self.gate_up(x)))

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        yield from self.gate_up.weight_shards(f"{name}.gate_proj", f"{name}.up_proj")
        yield from self.down.weight_shards(f"{name}.down_proj")
