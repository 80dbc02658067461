"""Gated activation of the feed-forward block (Shazeer 2020, arXiv:2002.05202: SwiGLU)."""

from __future__ import annotations

from torch import Tensor

from swell.kernels import backends


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2 * size] = [gate | up] -> new [..., size].

    silu(x) = x / (1 + exp(-x)), rounded to the input's type before the product, as modules in
    sequence would. Backends: reference, cpu.
    """
    return backends.get("activation", gate_up.device.type).silu_and_mul(gate_up)
