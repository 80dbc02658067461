"""Products in plain torch; weights are not packed."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def pack(weight: Tensor) -> Tensor:
    """See `swell.kernels.linear.pack`."""
    return weight


def panel() -> None:
    """See `swell.kernels.linear.panel`."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `swell.kernels.linear.linear`."""
    return F.linear(x, weight, bias)


def linear_argmax(x: Tensor, weight: Tensor, outs: int) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.linear.linear_argmax`."""
    y = F.linear(x, weight[:outs])
    first = y.argmax(dim=-1)
    return y.gather(-1, first.unsqueeze(-1)).squeeze(-1).float(), first


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """See `swell.kernels.linear.embedding`."""
    return F.embedding(ids, weight)
