"""Bitmasks in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor, value: float) -> None:
    """See `swell.kernels.bitmask.apply_bitmask`."""
    bit = torch.arange(32, dtype=torch.int32, device=bitmask.device)
    # The shift copies the sign bit, which `& 1` removes.
    bits = (bitmask[:, :, None] >> bit & 1).flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill_(bits == 0, value)
