"""Mixture of experts compiled from `moe.cpp`: one call for all experts of a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from swell.kernels.cpu.build import TYPES
from swell.kernels.cpu.capture.recording import INT, POINTER, Function
from swell.kernels.cpu.linear import members_of
from swell.kernels.linear import PackedTensor, Weight
from swell.kernels.moe import ExpertTable
from swell.kernels.reference import moe as reference
from swell.kernels.weights.quantized import PackedQuantizedTensor

_route = Function(
    "swell_route",
    "rows",
    **dict.fromkeys(("logits", "slots", "weights", "chosen"), POINTER),
    **dict.fromkeys(("rows", "experts", "top_k", "renormalize", "is_bf16"), INT),
)
_FORM = ("bits", "group", "has_mins", "wide_scales", "integers")
_experts = Function(
    "swell_expert_outputs",
    "rows",
    **dict.fromkeys(("x", "chosen", "addresses", "out"), POINTER),
    **dict.fromkeys(("rows", "top_k", "experts", "hidden", "size", "x_stride", "is_bf16"), INT),
    **dict.fromkeys((f"{part}_{name}" for part in ("gate_up", "down") for name in _FORM), INT),
)
_combine = Function(
    "swell_combine_experts",
    "rows",
    **dict.fromkeys(("outputs", "weights", "out"), POINTER),
    **dict.fromkeys(("rows", "top_k", "hidden", "is_bf16", "weights_are_bf16"), INT),
)


def route(
    logits: Tensor, top_k: int, renormalize: bool, slots: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `swell.kernels.moe.route`."""
    if logits.dtype not in TYPES:
        return reference.route(logits, top_k, renormalize, slots)
    logits = logits.contiguous()
    rows, experts = logits.shape
    assert 0 < top_k <= experts, (top_k, experts)
    weights = torch.empty((rows, top_k), dtype=torch.float32)
    chosen = torch.empty((rows, top_k), dtype=torch.int64)
    padding = () if slots is None else (slots,)
    assert all(each.dtype == torch.int64 and each.is_contiguous() for each in padding)
    _route(
        logits.data_ptr(), None if slots is None else slots.data_ptr(),
        weights.data_ptr(), chosen.data_ptr(),
        rows, experts, top_k, renormalize, logits.dtype == torch.bfloat16,
        used=(logits, weights, chosen, *padding),
    )  # fmt: skip
    return weights, chosen


def expert_outputs(x: Tensor, experts: Tensor, weights: ExpertTable, out: Tensor) -> None:
    """See `swell.kernels.moe.expert_outputs`."""
    gate_up, down = weights.alike or (x, x)
    if isinstance(gate_up, Tensor) or isinstance(down, Tensor):
        return reference.expert_outputs(x, experts, weights, out)
    if x.stride(1) != 1:
        x = x.contiguous()
    experts, (rows, hidden), size = experts.contiguous(), x.shape, down.in_features
    assert x.dtype == out.dtype == gate_up.dtype == down.dtype and x.dtype in TYPES, x.dtype
    assert gate_up.in_features == down.out_features == hidden, (hidden, gate_up, down)
    assert gate_up.out_features == 2 * size and experts.dtype == torch.int64
    assert out.is_contiguous() and out.shape == (*experts.shape, hidden)
    table = weights.addresses
    _experts(
        x.data_ptr(), experts.data_ptr(), table.data_ptr(), out.data_ptr(),
        rows, experts.shape[1], table.shape[1], hidden, size, x.stride(0),
        x.dtype == torch.bfloat16, *_form(gate_up), *_form(down),
        used=(x, experts, table, out),
    )  # fmt: skip


def _form(weight: Weight) -> tuple[int, ...]:
    """Returns the members of the struct `ExpertForm`."""
    if isinstance(weight, PackedQuantizedTensor):
        return members_of(weight)
    assert isinstance(weight, PackedTensor)
    return (0,) * len(_FORM)


def combine_experts(outputs: Tensor, weights: Tensor) -> Tensor:
    """See `swell.kernels.moe.combine_experts`."""
    if outputs.dtype not in TYPES or weights.dtype not in TYPES:
        return reference.combine_experts(outputs, weights)
    outputs, weights = outputs.contiguous(), weights.contiguous()
    rows, top_k, hidden = outputs.shape
    out = torch.empty((rows, hidden), dtype=outputs.dtype)
    _combine(
        outputs.data_ptr(), weights.data_ptr(), out.data_ptr(), rows, top_k, hidden,
        outputs.dtype == torch.bfloat16, weights.dtype == torch.bfloat16,
        used=(outputs, weights, out),
    )  # fmt: skip
    return out
