"""Activations in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `swell.kernels.activation.silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def gelu(x: Tensor) -> Tensor:
    """See `swell.kernels.activation.gelu`."""
    return torch.nn.functional.gelu(x)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """See `swell.kernels.activation.gelu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate) * up


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """See `swell.kernels.activation.gelu_tanh_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def scale(x: Tensor, factor: float) -> Tensor:
    """See `swell.kernels.activation.scale`."""
    return x * torch.tensor(factor, dtype=x.dtype)


def softcap(x: Tensor, cap: float) -> Tensor:
    """See `swell.kernels.activation.softcap`."""
    return torch.tanh(x / cap) * cap
