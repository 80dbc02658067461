"""Gated activation compiled from `activation.cpp`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from swell.kernels.cpu.build import TYPES, library
from swell.kernels.reference import activation as reference

_call = library().swell_silu_and_mul
_call.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 2 + [ctypes.c_int]
_call.restype = None


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `swell.kernels.activation.silu_and_mul`."""
    if gate_up.dtype not in TYPES:
        return reference.silu_and_mul(gate_up)
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype)
    _call(
        gate_up.data_ptr(), out.data_ptr(), out.numel() // max(1, size), size,
        gate_up.dtype == torch.bfloat16,
    )  # fmt: skip
    return out
