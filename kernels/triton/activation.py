"""Activations: one program for a part of a row.

    out = round(act(gate)) * up          gated, x = [gate | up]
    out = act(x)                         plain
    out = x * round(factor)              scaled
    out = round(tanh(round(x / cap))) * cap

`round` is the conversion to x's type; everything else is computed in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from swell.kernels.reference import activation as reference
from swell.kernels.triton import TYPES

BLOCK = 1024
"""Elements of a program."""


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _gelu_tanh(x):
    return x / (1.0 + tl.exp(-2.0 * 0.7978845608028654 * (x + 0.044715 * (x * x * x))))


@triton.jit
def _activate(
    x, out, SIZE: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """x [rows, SIZE], or [rows, 2 * SIZE] if GATED; out [rows, SIZE]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    start = row * SIZE * (2 if GATED else 1)
    value = ACT(tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32))
    if GATED:
        up = tl.load(x + start + SIZE + columns, mask=inside, other=0.0).to(tl.float32)
        value = value.to(x.dtype.element_ty).to(tl.float32) * up
    tl.store(out + row * SIZE + columns, value, mask=inside)


@triton.jit
def _scale(x, out, factor, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """x, out [rows, SIZE]"""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value * factor, mask=inside)


@triton.jit
def _softcap(x, out, cap, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """x, out [rows, SIZE]"""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + columns
    dtype = x.dtype.element_ty
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) / cap
    value = value.to(dtype).to(tl.float32)
    value = (1.0 - 2.0 / (tl.exp(2.0 * value) + 1.0)).to(dtype).to(tl.float32)
    tl.store(out + at, value * cap, mask=inside)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `swell.kernels.activation.silu_and_mul`."""
    if gate_up.dtype not in TYPES:
        return reference.silu_and_mul(gate_up)
    return _run(silu, gate_up, gated=True)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """See `swell.kernels.activation.gelu_and_mul`."""
    if gate_up.dtype not in TYPES:
        return reference.gelu_and_mul(gate_up)
    return _run(_gelu, gate_up, gated=True)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """See `swell.kernels.activation.gelu_tanh_and_mul`."""
    if gate_up.dtype not in TYPES:
        return reference.gelu_tanh_and_mul(gate_up)
    return _run(_gelu_tanh, gate_up, gated=True)


def gelu(x: Tensor) -> Tensor:
    """See `swell.kernels.activation.gelu`."""
    if x.dtype not in TYPES:
        return reference.gelu(x)
    return _run(_gelu, x, gated=False)


def scale(x: Tensor, factor: float) -> Tensor:
    """See `swell.kernels.activation.scale`."""
    if x.dtype not in TYPES:
        return reference.scale(x, factor)
    x, size = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    if rows := out.numel() // max(1, size):
        rounded = torch.tensor(factor, dtype=x.dtype).item()
        _scale[(rows, triton.cdiv(size, BLOCK))](x, out, rounded, size, BLOCK)
    return out


def softcap(x: Tensor, cap: float) -> Tensor:
    """See `swell.kernels.activation.softcap`."""
    if x.dtype not in TYPES:
        return reference.softcap(x, cap)
    x, size = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    if rows := out.numel() // max(1, size):
        _softcap[(rows, triton.cdiv(size, BLOCK))](x, out, cap, size, BLOCK)
    return out


def _run(act, x: Tensor, *, gated: bool) -> Tensor:
    """x [..., in] -> new [..., in / 2] if gated, otherwise [..., in]."""
    x = x.contiguous()
    size = x.shape[-1] // 2 if gated else x.shape[-1]
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    if rows := out.numel() // max(1, size):
        _activate[(rows, triton.cdiv(size, BLOCK))](x, out, size, act, gated, BLOCK)
    return out
