"""RMS norm compiled from `norm.cpp`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from swell.kernels.cpu.build import TYPES, library
from swell.kernels.reference import norm as reference

_call = library().swell_rms_norm
_call.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 4 + [ctypes.c_float, ctypes.c_int]
_call.restype = None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `swell.kernels.norm.rms_norm`."""
    if x.dtype not in TYPES or weight.dtype != x.dtype:
        return reference.rms_norm(x, weight, eps)
    size = x.shape[-1]
    strided = x.dim() == 3 and x.stride(2) == 1 and x.stride(1) == size
    if strided:  # heads of a wider projection, [T, heads, size]
        outer, inner, stride = x.shape[0], x.shape[1], x.stride(0)
    else:
        x = x.contiguous()
        outer, inner, stride = x.numel() // size, 1, size
    out = torch.empty(x.shape, dtype=x.dtype)
    bf16 = x.dtype == torch.bfloat16
    _call(
        x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), None,
        outer, inner, stride, size, eps, bf16,
    )  # fmt: skip
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.norm.add_rms_norm`."""
    if x.dtype not in TYPES or not (weight.dtype == residual.dtype == x.dtype):
        return reference.add_rms_norm(x, residual, weight, eps)
    assert x.shape == residual.shape
    x, residual = x.contiguous(), residual.contiguous()
    out, total, size = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    bf16 = x.dtype == torch.bfloat16
    _call(
        x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr(),
        x.numel() // size, 1, size, size, eps, bf16,
    )  # fmt: skip
    return out, total
