"""Root mean square normalization (Zhang and Sennrich 2019, arXiv:1910.07467), and layer
normalization (Ba, Kiros and Hinton 2016, arXiv:1607.06450).

y = weight * cast(x / sqrt(mean(x^2) + eps)), the statistics and the quotient in float32; the cast
to x's type comes BEFORE the product with the weight, as in transformers' LlamaRMSNorm. With a
float32 weight the product is in float32, too, and is rounded once, as in transformers'
Gemma3RMSNorm.
"""

from __future__ import annotations

from torch import Tensor

from swell.kernels import backends


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., size], weight [size] of x's type or float32 -> new [..., size] of x's type.

    Backends: reference, cpu, triton.
    """
    return backends.get("norm", x.device.type).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(x + residual), x + residual), new tensors of x's type.

    x, residual [..., size]; weight [size] as for `rms_norm`. The sum is rounded to x's type before
    it is normalized. Backends: reference, cpu, triton.
    """
    return backends.get("norm", x.device.type).add_rms_norm(x, residual, weight, eps)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> Tensor:
    """Computes (y - mean(y)) / sqrt(var(y) + eps) * weight (+ bias) for y = x (+ residual).

    x, residual [..., size], weight, bias [size] -> new [..., size] of x's type. The sum is rounded
    to x's type; everything else is computed in float32. Backends: reference, cpu, triton.
    """
    return backends.get("norm", x.device.type).layer_norm(x, weight, bias, eps, residual)
