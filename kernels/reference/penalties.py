"""Penalties in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    output_counts: Tensor,
    in_prompt: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """See `swell.kernels.penalties.apply_penalties`."""
    counts, before = output_counts[slots], logits[rows]
    in_output = counts > 0
    factor = torch.where(in_prompt[slots] | in_output, repetition[:, None], 1.0)
    after = torch.where(before > 0, before / factor, before * factor)
    after -= frequency[:, None] * counts + presence[:, None] * in_output
    logits[rows] = after
