"""Mixture of experts in plain torch: one product for each chosen expert."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from swell.kernels.activation import silu_and_mul
from swell.kernels.linear import Weight, linear


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.moe.route`."""
    weights, experts = torch.topk(torch.softmax(logits.float(), dim=-1), top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts


def expert_outputs(
    x: Tensor, experts: Tensor, weights: Mapping[int, tuple[Weight, Weight]], out: Tensor
) -> None:
    """See `swell.kernels.moe.expert_outputs`."""
    if not weights or not len(x):
        return
    chosen, rows = experts.flatten(), out.view(-1, out.shape[-1])
    # The (token, choice) pairs, grouped by expert, in token order.
    pairs = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=max(weights) + 1).tolist()
    ends = list(accumulate(counts))
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
