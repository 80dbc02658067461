"""RMS norm and layer norm compiled from `norm.cpp`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from swell.kernels.cpu.build import TYPES
from swell.kernels.cpu.capture.recording import FLOAT, INT, POINTER, Function
from swell.kernels.reference import norm as reference

_norm = Function(
    "swell_rms_norm",
    "outer",
    **dict.fromkeys(("x", "residual", "weight", "out", "total"), POINTER),
    **dict.fromkeys(("outer", "inner", "x_stride", "size", "is_bf16", "weight_is_bf16"), INT),
    eps=FLOAT,
)

_layer_norm = Function(
    "swell_layer_norm",
    "rows",
    **dict.fromkeys(("x", "residual", "weight", "bias", "out"), POINTER),
    **dict.fromkeys(("rows", "size", "is_bf16"), INT),
    eps=FLOAT,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `swell.kernels.norm.rms_norm`."""
    if x.dtype not in TYPES or weight.dtype not in (x.dtype, torch.float32):
        return reference.rms_norm(x, weight, eps)
    size = x.shape[-1]
    if x.dim() != 3:
        x = x.contiguous()
        outer, inner, stride = x.numel() // size, 1, size
    else:  # heads, possibly part of a wider projection, [T, heads, size]
        if x.stride(2) != 1 or x.stride(1) != size:
            x = x.contiguous()
        outer, inner, stride = x.shape[0], x.shape[1], x.stride(0)
    out = torch.empty(x.shape, dtype=x.dtype)
    _norm(
        x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), None,
        outer, inner, stride, size, *_are_bf16(x, weight), eps,
        used=(x, weight, out),
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.norm.add_rms_norm`."""
    is_known = x.dtype in TYPES and weight.dtype in (x.dtype, torch.float32)
    if not is_known or residual.dtype != x.dtype:
        return reference.add_rms_norm(x, residual, weight, eps)
    assert x.shape == residual.shape
    x, residual = x.contiguous(), residual.contiguous()
    out, total, size = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    _norm(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(),
        x.numel() // size, 1, size, size, *_are_bf16(x, weight), eps,
        used=(x, residual, weight, out, total),
    )  # fmt: skip
    return out, total


def _are_bf16(*tensors: Tensor) -> Iterator[bool]:
    return (tensor.dtype == torch.bfloat16 for tensor in tensors)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor:
    """See `swell.kernels.norm.layer_norm`."""
    if x.dtype not in TYPES or weight.dtype != x.dtype:
        return reference.layer_norm(x, weight, bias, eps, residual)
    assert residual is None or residual.shape == x.shape
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    out, size = torch.empty_like(x), x.shape[-1]
    _layer_norm(
        x.data_ptr(), None if residual is None else residual.data_ptr(), weight.data_ptr(),
        None if bias is None else bias.data_ptr(), out.data_ptr(),
        x.numel() // size, size, x.dtype == torch.bfloat16, eps,
        used=tuple(t for t in (x, residual, weight, bias, out) if t is not None),
    )  # fmt: skip
    return out
