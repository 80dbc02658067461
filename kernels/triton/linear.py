"""Products with packed weights, whose rows have the same bits in every batch.

A program computes BLOCK_M rows of BLOCK_N outputs:

    x [rows, in]          weight [out, in]            y [rows, out]
    [ BLOCK_M ]     x     [ BLOCK_N ]          ->     [ BLOCK_M x BLOCK_N ]

Its sizes depend on the weight only, never on the number of rows, and it adds the terms of a sum in
the order of the inputs, BLOCK_K at a time. So the bits of a row depend neither on the other rows
nor on its place among them. A weight is packed in panels of one output, which is its own order.

Products with other weights are those of torch, which chooses a kernel by the number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swell.kernels.linear import FloatWeight, PackedTensor, Weight
from swell.kernels.reference import linear as reference
from swell.kernels.triton import TYPES, Tile, float8, quantized
from swell.kernels.weights.quantized import PackedQuantizedTensor, QuantizedTensor

MANY_OUTPUTS = 4096
"""The number of outputs from which a program computes more of them: fewer programs would not use
all multiprocessors of a GPU."""


@triton.jit(do_not_specialize=["count"])
def _linear(
    x, weight, bias, y, count, IN: tl.constexpr, OUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x [count, IN], weight [OUT, IN], bias [OUT] or None, y [count, OUT]; all are contiguous."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, inside = row < count, column < OUT
    rows = x + row.to(tl.int64)[:, None] * IN
    weights = weight + column.to(tl.int64)[:, None] * IN
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, IN, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)[None, :]
        a = tl.load(rows + k, mask=is_row[:, None] & (k < IN), other=0.0)
        b = tl.load(weights + k, mask=inside[:, None] & (k < IN), other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    to = y + row.to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(to, total, mask=is_row[:, None] & inside[None, :])


def pack(weight: Tensor, exact: bool = False) -> FloatWeight:
    """See `swell.kernels.linear.pack`; a packed weight shares the memory of `weight`."""
    if not exact or weight.dtype not in TYPES:
        return weight
    outs, size = weight.shape
    return PackedTensor(weight.detach().contiguous().unsqueeze(2), outs, size)


def pack_quantized(
    weight: QuantizedTensor, dtype: torch.dtype, rounded_activations: bool = False
) -> PackedQuantizedTensor:
    """See `swell.kernels.linear.pack_quantized`; inputs are rounded only to E4M3."""
    assert dtype in TYPES, dtype
    if rounded_activations and (by_rows := float8.pack(weight, dtype)) is not None:
        return by_rows
    return PackedQuantizedTensor.pack(weight, quantized.PANEL, dtype, rounded_activations=False)


def panel() -> None:
    """See `swell.kernels.linear.panel`."""


numbers = reference.numbers


def numerics() -> None:
    """See `swell.kernels.linear.numerics`."""


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `swell.kernels.linear.linear`."""
    if isinstance(weight, Tensor):
        return reference.linear(x, weight, bias)
    return _multiply(x, weight, weight.out_features, bias)


def linear_argmax(x: Tensor, weight: Weight, outs: int) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.linear.linear_argmax`."""
    if isinstance(weight, Tensor):
        return reference.linear_argmax(x, weight, outs)
    assert 0 < outs <= weight.out_features, (outs, weight.out_features)
    return reference.largest(_multiply(x, weight, outs))


def embedding(ids: Tensor, weight: Weight) -> Tensor:
    """See `swell.kernels.linear.embedding`."""
    if isinstance(weight, float8.RowScaledTensor):
        return float8.rows(ids, weight)
    if isinstance(weight, PackedQuantizedTensor):
        return quantized.rows(ids, weight, 0)
    return reference.embedding(ids, plain(weight))


def embedding_part(ids: Tensor, weight: Weight, start: int) -> Tensor:
    """See `swell.kernels.linear.embedding_part`."""
    if isinstance(weight, float8.RowScaledTensor):
        local = ids - start
        elsewhere = (local < 0) | (local >= weight.out_features)
        found = float8.rows(local.masked_fill(elsewhere, 0), weight)
        return found.masked_fill_(elsewhere.unsqueeze(-1), 0)
    if isinstance(weight, PackedQuantizedTensor):
        return quantized.rows(ids, weight, start)
    return reference.embedding_part(ids, plain(weight), start)


pick_largest = reference.pick_largest


def plain(weight: FloatWeight) -> Tensor:
    """Returns a weight [out, in] without a copy."""
    return weight.data.squeeze(2) if isinstance(weight, PackedTensor) else weight


def _multiply(
    x: Tensor,
    weight: PackedTensor | PackedQuantizedTensor,
    outs: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Returns the first `outs` outputs."""
    if isinstance(weight, float8.RowScaledTensor):
        return float8.multiply(x, weight, bias)[..., :outs]
    if isinstance(weight, PackedQuantizedTensor):
        return quantized.multiply(x, weight, outs, bias)
    size, dtype = weight.in_features, weight.data.dtype
    assert x.shape[-1] == size and x.dtype == dtype, (x.shape, x.dtype)
    assert bias is None or (bias.dtype == dtype and bias.is_contiguous())
    x = x.contiguous()
    y = torch.empty((*x.shape[:-1], outs), dtype=dtype, device=x.device)
    count = x.numel() // size
    if count:
        # All sizes are those of the whole weight: `outs` must not change the bits of an output.
        tile = _tile(dtype, weight.out_features)
        _linear[(triton.cdiv(count, tile.rows), triton.cdiv(outs, tile.outputs))](
            x, plain(weight), bias, y, count, size, outs, tile.rows, tile.outputs, tile.inputs,
            num_warps=4, num_stages=tile.stages,
        )  # fmt: skip
    return y


def _tile(dtype: torch.dtype, outs: int) -> Tile:
    """Returns the sizes of a program. As many rows as a tensor core of an H100 multiplies at once:
    more would not be computed faster, and a decode step has few."""
    if dtype == torch.float32:
        return Tile(16, 32, 32, 2)
    return Tile(64, 64 if outs >= MANY_OUTPUTS else 32, 64, 4)
