"""Penalties in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    output_counts: Tensor,
    seen: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """See `swell.kernels.penalties.apply_penalties`."""
    counts, before = output_counts[slots], logits[rows]
    factor = torch.where(seen[slots], repetition[:, None], 1.0)
    after = torch.where(before > 0, before / factor, before * factor)
    after -= frequency[:, None] * counts + presence[:, None] * (counts > 0)
    logits[rows] = after


def count_tokens(output_counts: Tensor, seen: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """See `swell.kernels.penalties.count_tokens`."""
    one = torch.ones((), dtype=output_counts.dtype, device=output_counts.device)
    output_counts.index_put_((slots, tokens), one, accumulate=True)
    seen.index_put_((slots, tokens), torch.ones((), dtype=torch.bool, device=seen.device))
