"""Mixture of experts (Shazeer et al. 2017, arXiv:1701.06538; gated experts as in Mixtral).

    p    = softmax(logits)                            e_1 .. e_k: the k largest of p
    y[t] = sum_j w[t, j] * expert_{e_j}(x[t])         w[t, j] = p[t, e_j] (/ sum_j p[t, e_j])
    expert(x) = down(silu(gate(x)) * up(x))

The sum has two steps, because the experts may be on different ranks: `expert_outputs` computes the
terms of this rank's experts and leaves the others zero; after a sum over ranks, `combine_experts`
adds the terms. Each term is computed by exactly one rank, so the sum over ranks does not round.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from swell.kernels import backends
from swell.kernels.linear import Weight


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> (weights [T, k] float32, experts [T, k] int64), the largest first.

    The softmax is computed in float32; `renormalize` makes the k weights of a token sum to 1.
    Backends: reference.
    """
    return backends.get("moe", logits.device.type).route(logits, top_k, renormalize)


def expert_outputs(
    x: Tensor, experts: Tensor, weights: Mapping[int, tuple[Weight, Weight]], out: Tensor
) -> None:
    """Sets out[t, j] = expert_{experts[t, j]}(x[t]) if that expert is in `weights`; otherwise
    leaves it unchanged.

    x [T, hidden]; experts [T, k] int64; weights: expert -> (gate over up [2 * size, hidden], down
    [hidden, size]); out [T, k, hidden], contiguous, changes in place. Each expert computes one
    product (see `swell.kernels.linear.linear`) over the tokens that chose it, in their order; an
    expert without tokens costs nothing. With packed weights, out[t] has the same bits regardless of
    the other tokens; otherwise its rounding depends on how many tokens chose the same expert. It
    never depends on other experts or their placement. The host reads how often each expert was
    chosen, so each call waits once for the device. Backends: reference.
    """
    backends.get("moe", x.device.type).expert_outputs(x, experts, weights, out)


def combine_experts(outputs: Tensor, weights: Tensor) -> Tensor:
    """Computes sum_j weights[:, j] * outputs[:, j], j ascending: [T, k, hidden], [T, k] ->
    [T, hidden].

    Computed in float32 and rounded once to the type of `outputs`. Backends: reference.
    """
    return backends.get("moe", outputs.device.type).combine_experts(outputs, weights)
