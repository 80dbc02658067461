"""Activations compiled from `activation.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from swell.kernels.cpu.build import TYPES
from swell.kernels.cpu.capture.recording import FLOAT, INT, POINTER, Function
from swell.kernels.reference import activation as reference


def _function(name: str, **more: type) -> Function:
    return Function(
        name,
        "rows",
        **dict.fromkeys(("x", "out"), POINTER),
        **dict.fromkeys(("rows", "size", "is_bf16"), INT),
        **more,
    )


_silu_and_mul = _function("swell_silu_and_mul")
_gelu_and_mul = _function("swell_gelu_and_mul")
_gelu_tanh_and_mul = _function("swell_gelu_tanh_and_mul")
_gelu = _function("swell_gelu")
_scale = _function("swell_scale", factor=FLOAT)
_softcap = _function("swell_softcap", cap=FLOAT)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `swell.kernels.activation.silu_and_mul`."""
    if gate_up.dtype not in TYPES:
        return reference.silu_and_mul(gate_up)
    return _run(_silu_and_mul, gate_up, gate_up.shape[-1] // 2)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """See `swell.kernels.activation.gelu_and_mul`."""
    if gate_up.dtype not in TYPES:
        return reference.gelu_and_mul(gate_up)
    return _run(_gelu_and_mul, gate_up, gate_up.shape[-1] // 2)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """See `swell.kernels.activation.gelu_tanh_and_mul`."""
    if gate_up.dtype not in TYPES:
        return reference.gelu_tanh_and_mul(gate_up)
    return _run(_gelu_tanh_and_mul, gate_up, gate_up.shape[-1] // 2)


def scale(x: Tensor, factor: float) -> Tensor:
    """See `swell.kernels.activation.scale`."""
    if x.dtype not in TYPES:
        return reference.scale(x, factor)
    return _run(_scale, x, x.shape[-1], factor)


def softcap(x: Tensor, cap: float) -> Tensor:
    """See `swell.kernels.activation.softcap`."""
    if x.dtype not in TYPES:
        return reference.softcap(x, cap)
    return _run(_softcap, x, x.shape[-1], cap)


def gelu(x: Tensor) -> Tensor:
    """See `swell.kernels.activation.gelu`."""
    if x.dtype not in TYPES:
        return reference.gelu(x)
    return _run(_gelu, x, x.shape[-1])


def _run(function: Function, x: Tensor, size: int, *more: float) -> Tensor:
    """x [..., in] -> new [..., size]"""
    x = x.contiguous()
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype)
    function(
        x.data_ptr(), out.data_ptr(), out.numel() // max(1, size), size,
        x.dtype == torch.bfloat16, *more, used=(x, out),
    )  # fmt: skip
    return out
