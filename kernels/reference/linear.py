"""Products in plain torch; weights are not packed."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def pack(weight: Tensor, exact: bool = False) -> Tensor:
    """See `swell.kernels.linear.pack`."""
    return weight


def panel() -> None:
    """See `swell.kernels.linear.panel`."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `swell.kernels.linear.linear`."""
    return F.linear(x, weight, bias)


def linear_argmax(x: Tensor, weight: Tensor, outs: int) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.linear.linear_argmax`."""
    return largest(F.linear(x, weight[:outs]))


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """See `swell.kernels.linear.embedding`."""
    return F.embedding(ids, weight)


def largest(y: Tensor) -> tuple[Tensor, Tensor]:
    """y [S, out] -> the largest output of each row, [S] float32, and its index, [S] int64."""
    first = y.argmax(dim=-1)
    return y.gather(-1, first.unsqueeze(-1)).squeeze(-1).float(), first
