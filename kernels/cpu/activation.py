"""Gated activation compiled from `activation.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from swell.kernels.cpu.build import TYPES
from swell.kernels.cpu.graph import INT, POINTER, Function
from swell.kernels.reference import activation as reference

_silu = Function(
    "swell_silu_and_mul",
    "rows",
    **dict.fromkeys(("gate_up", "out"), POINTER),
    **dict.fromkeys(("rows", "size", "is_bf16"), INT),
)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `swell.kernels.activation.silu_and_mul`."""
    if gate_up.dtype not in TYPES:
        return reference.silu_and_mul(gate_up)
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype)
    _silu(
        gate_up.data_ptr(), out.data_ptr(), out.numel() // max(1, size), size,
        gate_up.dtype == torch.bfloat16, used=(gate_up, out),
    )  # fmt: skip
    return out
