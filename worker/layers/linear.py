"""Matrix products that are split among the ranks of a tensor group.

    column parallel   each rank has some rows of W [out, in], and so computes some of the outputs
    row parallel      each rank has some columns of W and multiplies the matching part of the input;
                      the outputs are summed over the group

A column layer followed by a row layer needs only one all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from swell.kernels.linear import linear
from swell.worker.comm.mesh import Group
from swell.worker.layers.lora import NO_LORA, ActiveAdapters, LayerLora, LoraPart, NoLora
from swell.worker.layers.packed_weight import PackedWeight, Packing
from swell.worker.layers.weight_shard import (
    ALL,
    WeightShard,
    divide,
    empty_parameter,
    replicated_shard,
)


@dataclass(frozen=True)
class Rows:
    """The rows of one checkpoint matrix that a rank holds."""

    start: int
    count: int
    total: int

    @classmethod
    def of(cls, what: str, total: int, group: Group) -> Rows:
        count = divide(what, total, group)
        return cls(group.rank * count, count, total)


class LinearLayer(PackedWeight):
    """A linear layer that adapters may adapt. Its subclasses compute this rank's part."""

    bias: nn.Parameter | None

    def __init__(self) -> None:
        super().__init__()
        self.lora: NoLora = NO_LORA

    def lora_parts(self, *names: str) -> list[LoraPart]:
        """Returns the matrices that an adapter may adapt; `names` as for `weight_shards`."""
        raise NotImplementedError

    def weight_shards(self, *names: str) -> Iterator[WeightShard]:
        """Returns the shards of this rank. `names`: the checkpoint's name of each of the layer's
        matrices, without `.weight`."""
        raise NotImplementedError

    def accept_adapters(
        self,
        names: Sequence[str],
        active: ActiveAdapters,
        adapters: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LayerLora:
        """Makes room for this many adapters of at most this rank, whose terms are added to the
        outputs from now on. `names` as for `weight_shards`; `active`: the adapters of the current
        step. Returns the object that stores them."""
        parts = self.lora_parts(*names)
        self.lora = lora = LayerLora(active, parts, adapters, max_rank, dtype, device)
        return lora


class _FusedColumns(LinearLayer):
    """Rows of several checkpoint matrices, stacked in one parameter, so that one product computes
    all of them."""

    def __init__(self, in_features: int, parts: Sequence[Rows], bias: bool) -> None:
        super().__init__()
        self.in_features = in_features
        self.parts = tuple(parts)
        rows = sum(part.count for part in parts)
        self.weight = empty_parameter(rows, in_features)
        self.bias = empty_parameter(rows) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., this rank's rows]"""
        return self.lora.add(x, linear(x, self.weight, self.bias))

    def lora_parts(self, *names: str) -> list[LoraPart]:
        inputs = slice(0, self.in_features)
        return [
            LoraPart(name, inputs, rows, (total, self.in_features))
            for name, rows, total in self._stored_rows(names)
        ]

    def weight_shards(self, *names: str) -> Iterator[WeightShard]:
        """`names` may be one name: the checkpoint then stores the matrices stacked in one."""
        start = 0
        for name, rows, total in self._stored_rows(names):
            here = slice(start, start + rows.stop - rows.start)
            shape = (total, self.in_features)
            yield WeightShard(f"{name}.weight", self.weight[here], (rows, ALL), shape)
            if self.bias is not None:
                yield WeightShard(f"{name}.bias", self.bias[here], (rows,), (total,))
            start = here.stop

    def _stored_rows(self, names: Sequence[str]) -> Iterator[tuple[str, slice, int]]:
        """Yields the matrix of the checkpoint that has each part, this rank's rows of it, and the
        number of all its rows."""
        if len(names) > 1 or len(self.parts) == 1:
            for name, part in zip(names, self.parts, strict=True):
                yield name, slice(part.start, part.start + part.count), part.total
            return
        before, total = 0, sum(part.total for part in self.parts)
        for part in self.parts:
            start = before + part.start
            yield names[0], slice(start, start + part.count), total
            before += part.total


class ColumnParallelLinear(_FusedColumns):
    """Each rank computes its part of the outputs; with `gather`, every rank gets all outputs."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group,
        bias: bool = False,
        gather: bool = False,
        what: str = "out_features",
    ) -> None:
        super().__init__(in_features, [Rows.of(what, out_features, group)], bias)
        self.out_features = out_features
        self.group = group
        self.gather = gather

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out / size], or [..., out] with `gather`"""
        y = super().forward(x)
        return self.group.all_gather(y, -1) if self.gather else y


class MergedColumnParallelLinear(_FusedColumns):
    """Several column-parallel layers on one input (gate and up), each split evenly."""

    def __init__(
        self,
        in_features: int,
        out_features: Sequence[int],
        group: Group,
        bias: bool = False,
        what: str = "out_features",
    ) -> None:
        super().__init__(in_features, [Rows.of(what, n, group) for n in out_features], bias)


class QKVParallelLinear(_FusedColumns):
    """Queries, keys and values in one product, split among the ranks by heads.

    With fewer KV heads than ranks, `size / kv_heads` neighbouring ranks have the same KV head: the
    ranks whose query heads read it.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        group: Group,
        bias: bool = False,
    ) -> None:
        self.heads = divide("num_attention_heads", heads, group)
        if group.size > kv_heads and group.size % kv_heads == 0:
            self.kv_heads = 1
            first = group.rank * kv_heads // group.size
        else:
            self.kv_heads = divide("num_key_value_heads", kv_heads, group)
            first = group.rank * self.kv_heads
        q = Rows(group.rank * self.heads * head_dim, self.heads * head_dim, heads * head_dim)
        kv = Rows(first * head_dim, self.kv_heads * head_dim, kv_heads * head_dim)
        super().__init__(hidden, (q, kv, kv), bias)
        self.sizes = [q.count, kv.count, kv.count]
        """Sizes of this rank's queries, keys and values in the output."""


class RowParallelLinear(LinearLayer):
    """Each rank multiplies its part of the inputs; every rank gets the sum over the group.

    With `split_input`, every rank gets the whole input and selects its part.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        group: Group,
        bias: bool = False,
        split_input: bool = False,
        what: str = "in_features",
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.group = group
        self.columns = Rows.of(what, in_features, group)
        self.split_input = split_input
        self.weight = empty_parameter(out_features, self.columns.count)
        self.bias = empty_parameter(out_features) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in / size] ([..., in] with `split_input`) -> [..., out]"""
        if self.split_input:
            x = x.narrow(-1, self.columns.start, self.columns.count)
        if self.group.size == 1:
            return self.lora.add(x, linear(x, self.weight, self.bias))
        y = self.group.all_reduce_in_order(self.lora.add(x, linear(x, self.weight)))
        return y if self.bias is None else y + self.bias

    def lora_parts(self, *names: str) -> list[LoraPart]:
        (name,) = names
        columns = slice(self.columns.start, self.columns.start + self.columns.count)
        shape = (self.out_features, self.in_features)
        return [LoraPart(name, columns, slice(0, self.out_features), shape)]

    def weight_shards(self, *names: str) -> Iterator[WeightShard]:
        (name,) = names
        columns = slice(self.columns.start, self.columns.start + self.columns.count)
        shape = (self.out_features, self.in_features)
        yield WeightShard(f"{name}.weight", self.weight, (ALL, columns), shape)
        if self.bias is not None:
            yield replicated_shard(f"{name}.bias", self.bias)


class ReplicatedLinear(PackedWeight):
    """A linear layer whose whole matrix is on every rank, which computes all outputs. Such layers
    are small, so they are never quantized."""

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None

    def quantized_bits(self, packing: Packing) -> int | None:
        return None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]"""
        return linear(x, self.weight, self.bias)

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        yield replicated_shard(f"{name}.weight", self.weight)
        if self.bias is not None:
            yield replicated_shard(f"{name}.bias", self.bias)
