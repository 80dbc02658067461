"""Products compiled from `linear.cpp`: the weight packed in panels of neighbouring outputs."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from swell.kernels.cpu.build import TYPES, library
from swell.kernels.linear import Packed, Weight
from swell.kernels.reference import linear as reference

_call = library().swell_linear
_call.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4 + [ctypes.c_int]
_call.restype = None
_embed = library().swell_embedding
_embed.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2 + [ctypes.c_int]
_embed.restype = None
_panel = library().swell_linear_panel
_panel.restype = ctypes.c_int64

PANEL = _panel()
"""Outputs that lie side by side; the last panel is filled up with zeros."""


def pack(weight: Tensor) -> Weight:
    """See `swell.kernels.linear.pack`: a copy [out / PANEL, in, PANEL]."""
    if weight.dtype not in TYPES:
        return weight
    outs, size = weight.shape
    panels = -(-outs // PANEL)
    data = weight.new_zeros(panels, size, PANEL)
    whole = outs // PANEL
    data[:whole].copy_(weight[: whole * PANEL].unflatten(0, (whole, PANEL)).transpose(1, 2))
    if whole < panels:
        data[whole, :, : outs - whole * PANEL] = weight[whole * PANEL :].T
    return Packed(data, outs, size)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `swell.kernels.linear.linear`."""
    if not isinstance(weight, Packed):
        return reference.linear(x, weight, bias)
    data, outs, size = weight.data, weight.out_features, weight.in_features
    assert x.shape[-1] == size and x.dtype == data.dtype, (x.shape, x.dtype)
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((*x.shape[:-1], outs), dtype=x.dtype)
    _call(
        x.data_ptr(), data.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        out.numel() // outs, size, outs, x.stride(0) if x.dim() == 2 else size,
        x.dtype == torch.bfloat16,
    )  # fmt: skip
    return out


def embedding(ids: Tensor, weight: Weight) -> Tensor:
    """See `swell.kernels.linear.embedding`."""
    if not isinstance(weight, Packed):
        return reference.embedding(ids, weight)
    ids = ids.to(torch.int64).contiguous()
    data, size = weight.data, weight.in_features
    out = torch.empty((*ids.shape, size), dtype=data.dtype)
    _embed(
        ids.data_ptr(), data.data_ptr(), out.data_ptr(), ids.numel(), size,
        data.dtype == torch.bfloat16,
    )  # fmt: skip
    return out
