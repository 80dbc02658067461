"""Mixture of experts (Shazeer et al. 2017, arXiv:1701.06538; gated experts as in Mixtral).

    p    = softmax(logits)                            e_1 .. e_k: the k largest of p
    y[t] = sum_j w[t, j] * expert_{e_j}(x[t])         w[t, j] = p[t, e_j] (/ sum_j p[t, e_j])
    expert(x) = down(silu(gate(x)) * up(x))

The sum has two steps, because the experts may be on different ranks: `expert_outputs` computes the
terms of this rank's experts and leaves the others zero, and `combine_experts` adds terms. Each term
is computed by exactly one rank. So if the ranks' terms are added before they are combined, that sum
does not round; to combine first moves k times less between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping

import torch
from torch import Tensor

from swell.kernels import backends
from swell.kernels.linear import PackedTensor, Weight
from swell.kernels.weights.quantized import PackedQuantizedTensor

ALIGNMENT = 16
"""Bytes to which the weights of experts are aligned on a GPU, which loads as many at once."""


class ExpertTable(MutableMapping[int, tuple[Weight, Weight]]):
    """Maps the experts of a layer that a rank holds to their weights: gate over up [2 * size,
    hidden] and down [hidden, size], for products of one type and each contiguous. A backend for
    GPUs finds the weights by their addresses in the device's memory."""

    def __init__(
        self,
        count: int,
        device: torch.device,
        weights: Mapping[int, tuple[Weight, Weight]] | None = None,
    ) -> None:
        """`count`: the number of experts of the layer, E; `weights`: those held at first."""
        self._weights: dict[int, tuple[Weight, Weight]] = {}
        self._alike: tuple[Weight, Weight] | None = None
        # [2, E] int64: the address of an expert's two weights; 0: not held. The tensor is changed
        # in place, because a captured step reads it.
        self.addresses = torch.zeros(2, count, dtype=torch.int64, device=device)
        self.update(weights or {})

    def __getitem__(self, expert: int) -> tuple[Weight, Weight]:
        return self._weights[expert]

    def __setitem__(self, expert: int, weights: tuple[Weight, Weight]) -> None:
        self._weights[expert] = weights
        self._alike = None
        self._write_addresses(expert)

    def __delitem__(self, expert: int) -> None:
        del self._weights[expert]
        self._alike = None
        self.addresses[:, expert] = 0

    def __iter__(self) -> Iterator[int]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def alike(self) -> tuple[Weight, Weight] | None:
        """The weights of one of the experts, if those of all of them have the same types, sizes and
        forms; otherwise, and without experts, None."""
        weights = self._weights.values()
        if self._alike is None and len({tuple(map(self._form, pair)) for pair in weights}) == 1:
            self._alike = next(iter(weights))
        return self._alike

    @staticmethod
    def _form(weight: Weight) -> tuple[object, ...]:
        """Returns what one call for many weights needs to know of each of them."""
        if isinstance(weight, Tensor):
            return Tensor, weight.dtype, weight.shape
        sizes = weight.out_features, weight.in_features
        if isinstance(weight, PackedTensor):
            return PackedTensor, weight.dtype, *sizes
        return PackedQuantizedTensor, weight.dtype, *sizes, weight.form, weight.rounded_activations

    def refresh(self) -> None:
        """Reads the addresses again, after the weights got other memory without other tensors."""
        for expert in self._weights:
            self._write_addresses(expert)

    def _write_addresses(self, expert: int) -> None:
        found = [weight.data.data_ptr() for weight in self._weights[expert]]
        assert self.addresses.device.type == "cpu" or not any(at % ALIGNMENT for at in found)
        self.addresses[:, expert] = torch.tensor(found, dtype=torch.int64)


def route(
    logits: Tensor, top_k: int, renormalize: bool, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> (weights [T, k] float32, experts [T, k] int64), the largest first.

    The softmax is computed in float32; `renormalize` makes the k weights of a token sum to 1. Any
    of equal logits may be chosen. slots [T] int64, or None: a token with the slot -1 is padding
    (see `swell.kernels.inputs`), whose logits may be anything: its experts are -1 and its weights
    0. Backends: reference, cpu, triton.
    """
    return backends.get("moe", logits.device.type).route(logits, top_k, renormalize, slots)


def expert_outputs(x: Tensor, experts: Tensor, weights: ExpertTable, out: Tensor) -> None:
    """Sets out[t, j] = expert_{experts[t, j]}(x[t]) if that expert is in `weights`; otherwise
    leaves it unchanged, as for -1.

    x [T, hidden]; experts [T, k] int64; out [T, k, hidden], contiguous, changes in place. Products
    are those of `swell.kernels.linear.linear`, and an expert without tokens costs nothing. Weights
    may be quantized. With packed weights it is exact: out[t] has the same bits for any other
    tokens. Otherwise its rounding depends in `reference` on how many tokens chose the same expert,
    and in `triton` only on T. It never depends on other experts or their placement. In `reference`,
    and in `triton` if the forms of experts are not alike, the host reads how often each expert was
    chosen, so each call waits once for the device. Backends: reference, cpu (all packed experts in
    one call, if their forms are alike), triton.
    """
    backends.get("moe", x.device.type).expert_outputs(x, experts, weights, out)


def combine_experts(outputs: Tensor, weights: Tensor) -> Tensor:
    """Computes sum_j weights[:, j] * outputs[:, j], j ascending: [T, k, hidden], [T, k] ->
    [T, hidden].

    Computed in float32 and rounded once to the type of `outputs`. Backends: reference, cpu, triton.
    """
    return backends.get("moe", outputs.device.type).combine_experts(outputs, weights)
