"""Activations of the feed-forward block: gated (Shazeer 2020, arXiv:2002.05202: SwiGLU, GEGLU), and
GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415); the scale of embeddings; and the bound of logits
(soft cap)."""

from __future__ import annotations

from torch import Tensor

from swell.kernels import backends


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2 * size] = [gate | up] -> new [..., size].

    silu(x) = x / (1 + exp(-x)), rounded to the input's type before the product, as it would be by
    two separate modules. Backends: reference, cpu, triton.
    """
    return backends.get("activation", gate_up.device.type).silu_and_mul(gate_up)


def gelu(x: Tensor) -> Tensor:
    """x * (1 + erf(x / sqrt(2))) / 2 -> new tensor of x's shape.

    Backends: reference, cpu, triton.
    """
    return backends.get("activation", x.device.type).gelu(x)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up for gate_up [..., 2 * size] = [gate | up] -> new [..., size].

    `gelu` is rounded to the input's type before the product. Backends: reference, cpu, triton.
    """
    return backends.get("activation", gate_up.device.type).gelu_and_mul(gate_up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up as in `gelu_and_mul`, with the approximation
    gelu(x) = x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2.

    Backends: reference, cpu, triton.
    """
    return backends.get("activation", gate_up.device.type).gelu_tanh_and_mul(gate_up)


def scale(x: Tensor, factor: float) -> Tensor:
    """x [..., size] * factor, which is rounded to x's type -> new tensor.

    Backends: reference, cpu, triton.
    """
    return backends.get("activation", x.device.type).scale(x, factor)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap) for cap > 0 -> new tensor of x's shape.

    Rounded to x's type after the division, after tanh and after the product, as it would be by
    separate operations of torch. Backends: reference, cpu, triton.
    """
    return backends.get("activation", x.device.type).softcap(x, cap)
