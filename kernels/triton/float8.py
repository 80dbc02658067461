"""Products of E4M3 numbers by `torch._scaled_mm`, with a scale for each row and each output:

    y[r, o] = sum over i of x8[r, i] * w8[o, i], * row_scale[r] * scale[o], + bias[o]

The inputs x8 of a row are rounded to E4M3, too: one kernel divides them by the row's largest
magnitude / 448. `torch._scaled_mm` needs compute capability 8.9 or later, and chooses a kernel by
the number of rows, so the bits of a row depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from swell.kernels.host.cache_format import LIMITS
from swell.kernels.triton.attention.vectors import float8
from swell.kernels.weights.quantized import Numbers, PackedQuantizedTensor, QuantizedTensor

MULTIPLE = 16
"""`torch._scaled_mm` multiplies matrices whose inputs and outputs are multiples of this."""
ROW_INPUTS = 4096
"""The most inputs of a row that a program rounds at once."""
_LIMIT = tl.constexpr(LIMITS[torch.float8_e4m3fn])


@dataclass(frozen=True)
class RowScaledTensor(PackedQuantizedTensor):
    """A weight of E4M3 numbers with one scale for each output, in the order of a checkpoint.

    `data` [bytes] uint8: the numbers [out, in], then the scales [out] float32.
    """

    @property
    def floats(self) -> Tensor:
        """[out, in] float8_e4m3fn"""
        codes = self.data[: self.out_features * self.in_features]
        return codes.view(torch.float8_e4m3fn).view(self.out_features, self.in_features)

    @property
    def scales(self) -> Tensor:
        """[out] float32"""
        return self.data[self.out_features * self.in_features :].view(torch.float32)

    def unpack(self) -> QuantizedTensor:
        groups = self.in_features // self.form.group
        scales = self.scales.to(self.form.scale_type).unsqueeze(1).repeat(1, groups)
        codes = self.floats.view(torch.uint8)
        return QuantizedTensor(codes, scales, None, self.form.bits, self.form.numbers)


@triton.jit
def _round_rows(x, codes, scales, IN: tl.constexpr, BLOCK: tl.constexpr):
    """x [rows, IN]; codes [rows, IN] uint8, the bits of E4M3; scales [rows] float32. The scale of a
    row with a number that is not finite is not finite either, and its codes are zero."""
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    most = tl.zeros([BLOCK], tl.int32)
    for first in range(0, IN, BLOCK):
        column = first + lane
        part = tl.load(x + row * IN + column, mask=column < IN, other=0.0).to(tl.float32)
        most = tl.maximum(most, part.to(tl.int32, bitcast=True) & 0x7FFFFFFF)  # NaN is the largest
    largest_bits = tl.max(most, 0)
    largest = largest_bits.to(tl.float32, bitcast=True)
    is_zero = largest < 7.888609052210118e-31  # 2 ** -100
    is_scaled = (largest_bits < 0x7F800000) & (is_zero == 0)
    scale = tl.where(is_zero, 0.0, tl.div_rn(largest, _LIMIT))
    tl.store(scales + row, scale)
    divisor = tl.where(is_scaled, scale, 1.0)
    for first in range(0, IN, BLOCK):
        column = first + lane
        part = tl.load(x + row * IN + column, mask=column < IN, other=0.0).to(tl.float32)
        rounded = float8(tl.div_rn(tl.where(is_scaled, part, 0.0), divisor))
        tl.store(codes + row * IN + column, rounded.to(tl.uint8), mask=column < IN)


def pack(weight: QuantizedTensor, dtype: torch.dtype) -> RowScaledTensor | None:
    """Returns a weight for products of `dtype`; None if `torch._scaled_mm` does not compute them:
    a row has several scales, say."""
    (outs, size), scales = weight.integers.shape, weight.scales.float()
    if weight.numbers is not Numbers.E4M3 or dtype != torch.bfloat16:
        return None
    if outs % MULTIPLE or size % MULTIPLE or not bool((scales == scales[:, :1]).all()):
        return None
    codes = weight.integers.contiguous().view(-1)
    data = torch.cat([codes, scales[:, 0].contiguous().view(torch.uint8)])
    return RowScaledTensor(data, outs, size, weight.form, dtype, rounded_activations=True)


def multiply(x: Tensor, weight: RowScaledTensor, bias: Tensor | None = None) -> Tensor:
    """Returns all outputs."""
    size = weight.in_features
    assert x.shape[-1] == size and x.dtype == weight.dtype, (x.shape, x.dtype)
    x = x.contiguous()
    count = x.numel() // size
    if not count:
        return x.new_empty(*x.shape[:-1], weight.out_features)
    codes = torch.empty(count, size, dtype=torch.uint8, device=x.device)
    scales = torch.empty(count, 1, dtype=torch.float32, device=x.device)
    # Without fused multiply-adds quotients are rounded once.
    _round_rows[(count,)](
        x, codes, scales, size, min(ROW_INPUTS, triton.next_power_of_2(size)), num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    y = torch._scaled_mm(
        codes.view(torch.float8_e4m3fn),
        weight.floats.t(),
        scale_a=scales,
        scale_b=weight.scales.unsqueeze(0),
        bias=bias,
        out_dtype=weight.dtype,
    )
    return y.view(*x.shape[:-1], weight.out_features)


def rows(ids: Tensor, weight: RowScaledTensor) -> Tensor:
    """Returns rows of a weight that are inside it."""
    found = weight.floats.view(torch.uint8)[ids].view(torch.float8_e4m3fn).float()
    return (found * weight.scales[ids].unsqueeze(-1)).to(weight.dtype)
