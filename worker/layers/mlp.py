"""The feed-forward block of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import nn

from swell.kernels.activation import gelu, gelu_and_mul, gelu_tanh_and_mul, silu_and_mul
from swell.worker.comm.mesh import Group
from swell.worker.layers.linear import (
    ColumnParallelLinear,
    LinearLayer,
    MergedColumnParallelLinear,
    RowParallelLinear,
)
from swell.worker.layers.weight_shard import WeightShard


class FeedForward(nn.Module, ABC):
    """The feed-forward block of a layer: maps [T, hidden] to [T, hidden], each token by itself."""

    @abstractmethod
    def forward(self, x: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]. slots [T] int64, or None: a token with the slot -1 is
        padding, whose result may be anything."""

    @abstractmethod
    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        """Returns what to read from a checkpoint in which the block is called `name`."""


GATED = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_pytorch_tanh": gelu_tanh_and_mul,
}
"""The name of an activation in a config -> act(gate) * up."""


class GatedMLP(FeedForward):
    """`down(act(gate(x)) * up(x))`: gate and up are one column-parallel product, down is
    row-parallel."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        group: Group,
        bias: bool = False,
        activation: str = "silu",
        names: tuple[str, ...] = ("gate_proj", "up_proj"),
    ) -> None:
        """`names`: the names of gate and up in a checkpoint, or one for both, stacked."""
        super().__init__()
        self.gate_up_names = names
        self.act_and_mul = GATED[activation]
        what = "intermediate_size"
        self.gate_up = MergedColumnParallelLinear(hidden, [intermediate] * 2, group, bias, what)
        self.down = RowParallelLinear(intermediate, hidden, group, bias, what=what)

    def forward(self, x: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        return self.down(self.act_and_mul(self.gate_up(x)))

    def linear_layers(self, name: str) -> Iterator[tuple[LinearLayer, tuple[str, ...]]]:
        """Yields each linear layer with its matrices' names in the checkpoint."""
        yield self.gate_up, tuple(f"{name}.{each}" for each in self.gate_up_names)
        yield self.down, (f"{name}.down_proj",)

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        for layer, names in self.linear_layers(name):
            yield from layer.weight_shards(*names)


class GeluMLP(FeedForward):
    """`down(gelu(up(x)))`, with biases: up is column-parallel, down is row-parallel."""

    def __init__(self, hidden: int, intermediate: int, group: Group) -> None:
        super().__init__()
        what = "intermediate_size"
        self.up = ColumnParallelLinear(hidden, intermediate, group, bias=True, what=what)
        self.down = RowParallelLinear(intermediate, hidden, group, bias=True, what=what)

    def forward(self, x: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        return self.down(gelu(self.up(x)))

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        yield from self.up.weight_shards(f"{name}.intermediate.dense")
        yield from self.down.weight_shards(f"{name}.output.dense")
