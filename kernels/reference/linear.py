"""Products in plain torch; weights are not packed. Quantized weights are dequantized for each
product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from swell.kernels.linear import Weight
from swell.kernels.weights.quantized import Numbers, PackedQuantizedTensor, QuantizedTensor

_PANEL = 1


def pack(weight: Tensor, exact: bool = False) -> Tensor:
    """See `swell.kernels.linear.pack`."""
    return weight


def pack_quantized(
    weight: QuantizedTensor, dtype: torch.dtype, rounded_activations: bool = False
) -> PackedQuantizedTensor:
    """See `swell.kernels.linear.pack_quantized`."""
    return PackedQuantizedTensor.pack(weight, _PANEL, dtype, rounded_activations)


def numbers() -> frozenset[Numbers]:
    """See `swell.kernels.linear.numbers`."""
    return frozenset(Numbers)


def panel() -> None:
    """See `swell.kernels.linear.panel`."""


def numerics() -> None:
    """See `swell.kernels.linear.numerics`."""


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `swell.kernels.linear.linear`."""
    return F.linear(x, _plain(weight), bias)


def linear_argmax(x: Tensor, weight: Weight, outs: int) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.linear.linear_argmax`."""
    return largest(F.linear(x, _plain(weight)[:outs]))


def embedding(ids: Tensor, weight: Weight) -> Tensor:
    """See `swell.kernels.linear.embedding`."""
    return F.embedding(ids, _plain(weight))


def embedding_part(ids: Tensor, weight: Weight, start: int) -> Tensor:
    """See `swell.kernels.linear.embedding_part`."""
    plain = _plain(weight)
    local = ids - start
    elsewhere = (local < 0) | (local >= len(plain))
    found = F.embedding(local.masked_fill(elsewhere, 0), plain)
    return found.masked_fill_(elsewhere.unsqueeze(-1), 0)


def pick_largest(values: Tensor, indices: Tensor, part: int) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.linear.pick_largest`."""
    largest_values, parts = values.max(1, keepdim=True)  # `max` treats NaN as the largest value
    return largest_values[:, 0], (indices.gather(1, parts) + parts * part)[:, 0]


def _plain(weight: Weight) -> Tensor:
    if isinstance(weight, PackedQuantizedTensor):
        return weight.unpack().dequantize(weight.dtype)
    return weight if isinstance(weight, Tensor) else weight.unpack()


def largest(y: Tensor) -> tuple[Tensor, Tensor]:
    """y [S, out] -> the largest output of each row, [S] float32, and its index, [S] int64."""
    first = y.argmax(dim=-1)
    return y.gather(-1, first.unsqueeze(-1)).squeeze(-1).float(), first
