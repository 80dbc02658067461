"""Mixture of experts in plain torch: one product for each chosen expert."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from swell.kernels.activation import silu_and_mul
from swell.kernels.linear import linear
from swell.kernels.moe import ExpertTable


def route(
    logits: Tensor, top_k: int, renormalize: bool, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.moe.route`."""
    weights, experts = torch.topk(torch.softmax(logits.float(), dim=-1), top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if slots is not None:
        is_padding = (slots < 0).unsqueeze(1)
        weights = weights.masked_fill(is_padding, 0.0)
        experts = experts.masked_fill(is_padding, -1)
    return weights, experts


def expert_outputs(x: Tensor, experts: Tensor, weights: ExpertTable, out: Tensor) -> None:
    """See `swell.kernels.moe.expert_outputs`."""
    if not weights or not len(x):
        return
    chosen, rows = experts.flatten(), out.view(-1, out.shape[-1])
    # The (token, choice) pairs, grouped by expert, in token order; those of padding come first.
    pairs = chosen.argsort(stable=True)
    padding, *counts = torch.bincount(chosen + 1, minlength=max(weights) + 2).tolist()
    ends = list(accumulate(counts, initial=padding))[1:]
    for expert, (gate_up, down) in sorted(weights.items()):
        if counts[expert]:
            mine = pairs[ends[expert] - counts[expert] : ends[expert]]
            hidden = silu_and_mul(linear(x[mine // experts.shape[1]], gate_up))
            rows[mine] = linear(hidden, down)


def combine_experts(outputs: Tensor, weights: Tensor) -> Tensor:
    """See `swell.kernels.moe.combine_experts`."""
    total = outputs[:, 0].float() * weights[:, :1].float()
    for j in range(1, outputs.shape[1]):
        total += outputs[:, j].float() * weights[:, j : j + 1].float()
    return total.to(outputs.dtype)
