"""RMS norm and layer norm: one program for each vector, which it reads once.

    total = round(x + residual)                        if there is a residual
    RMS     out = weight * round(total / sqrt(mean(total^2) + eps))
    layer   out = weight * (total - mean(total)) / sqrt(var(total) + eps) + bias

`round` is the conversion to x's type, except that a float32 weight is multiplied with the unrounded
quotient; everything else is computed in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swell.kernels.reference import norm as reference
from swell.kernels.triton import TYPES


@triton.jit
def _rms_norm(
    x, residual, weight, out, total, outer_stride, inner_stride,
    INNER: tl.constexpr, SIZE: tl.constexpr, EPS: tl.constexpr, ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """x: groups of INNER vectors of SIZE elements; all other tensors are contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    start = row // INNER * outer_stride + row % INNER * inner_stride
    values = tl.load(x + start + columns, mask=inside, other=0.0)
    if ADDS:
        other = tl.load(residual + row * SIZE + columns, mask=inside, other=0.0)
        values = (values.to(tl.float32) + other.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total + row * SIZE + columns, values, mask=inside)
    wide = values.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide) / SIZE + EPS)
    normed = (wide * inverse).to(weight.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, scale * normed, mask=inside)


@triton.jit
def _layer_norm(
    x, residual, weight, bias, out,
    SIZE: tl.constexpr, EPS: tl.constexpr, ADDS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """All tensors are contiguous."""
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        total = total.to(x.dtype.element_ty).to(tl.float32)
    centered = tl.where(inside, total - tl.sum(total) / SIZE, 0.0)
    inverse = tl.rsqrt(tl.sum(centered * centered) / SIZE + EPS)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    normed = centered * inverse * scale
    if HAS_BIAS:
        normed += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, normed, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `swell.kernels.norm.rms_norm`."""
    if x.dtype not in TYPES or weight.dtype not in (x.dtype, torch.float32):
        return reference.rms_norm(x, weight, eps)
    if x.dim() != 3 or x.stride(2) != 1:
        x = x.contiguous()
    # [T, heads, size] may be a part of a wider projection.
    inner = x.shape[1] if x.dim() == 3 else 1
    strides = x.stride()[:2] if x.dim() == 3 else (x.shape[-1], 0)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_rms_norm, out, x, x, weight, out, out, *strides, inner, x.shape[-1], eps, False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.norm.add_rms_norm`."""
    is_known = x.dtype in TYPES and weight.dtype in (x.dtype, torch.float32)
    if not is_known or residual.dtype != x.dtype:
        return reference.add_rms_norm(x, residual, weight, eps)
    x, residual, size = x.contiguous(), residual.contiguous(), x.shape[-1]
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(_rms_norm, out, x, residual, weight, out, total, size, 0, 1, size, eps, True)
    return out, total


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor:
    """See `swell.kernels.norm.layer_norm`."""
    if x.dtype not in TYPES or weight.dtype != x.dtype:
        return reference.layer_norm(x, weight, bias, eps, residual)
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    out, has_bias, adds = torch.empty_like(x), bias is not None, residual is not None
    _launch(_layer_norm, out, x, residual, weight, bias, out, x.shape[-1], eps, adds, has_bias)
    return out


def _launch(kernel, out: Tensor, *arguments) -> None:
    """Runs one program for each vector of `out`, with a warp for each KiB of it."""
    block = triton.next_power_of_2(out.shape[-1])
    warps = min(32, max(1, block * out.itemsize // 1024))
    if rows := out.numel() // out.shape[-1]:
        kernel[(rows,)](*arguments, BLOCK=block, num_warps=warps)
