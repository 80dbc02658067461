"""Sends the weights of experts from rank to rank.

The processors of ranks may pack weights in different orders, so a weight is sent in the order of a
checkpoint: as floats, or as integers, scales and minima. If experts may be quantized, the form of
each weight is sent first, because the matrices of one checkpoint may have different forms.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from swell.kernels.linear import PackedTensor, Weight
from swell.kernels.weights.quantized import (
    Numbers,
    PackedQuantizedTensor,
    QuantizedForm,
    QuantizedTensor,
)
from swell.worker.comm.mesh import Group
from swell.worker.layers.moe import Expert, MoE

_DESCRIBED = 5
"""The numbers that describe the form of a weight."""


def send_expert(layer: MoE, expert: int, group: Group, target: int) -> None:
    """Sends an expert of this rank to rank `target` of `group`, which calls `receive_expert`."""
    for weight in layer.local_experts[expert]:
        if layer.may_quantize:
            group.send(_described(weight), target).wait()
        for tensor in _parts(weight):
            group.send(tensor, target).wait()


def receive_expert(layer: MoE, group: Group, source: int) -> Expert:
    """Receives an expert from rank `source` of `group`; a weight of floats is not packed yet."""
    gate_up, down = (_receive(layer, empty, group, source) for empty in layer.make_expert())
    return gate_up, down


def _receive(layer: MoE, empty: torch.Tensor, group: Group, source: int) -> Weight:
    """Receives one weight; `empty` has its shape and the type of its floats."""
    form = None
    if layer.may_quantize:
        form = _form(group.recv(torch.zeros(_DESCRIBED, dtype=torch.int64), source))
    if form is None:
        return group.recv(empty, source)
    outs, inputs = empty.shape
    integers = group.recv(torch.empty(outs, inputs, dtype=torch.uint8), source)
    scales, *mins = (
        group.recv(torch.empty(outs, inputs // form.group, dtype=form.scale_type), source)
        for _ in range(1 + form.has_mins)
    )
    low = mins[0] if mins else None
    quantized = QuantizedTensor(integers, scales, low, form.bits, form.numbers)
    return layer.packing.pack(quantized, empty.dtype)


def _parts(weight: Weight) -> Iterator[torch.Tensor]:
    if isinstance(weight, PackedQuantizedTensor):
        quantized = weight.unpack()
        yield quantized.integers
        yield quantized.scales
        if quantized.mins is not None:
            yield quantized.mins
    else:
        yield weight.unpack() if isinstance(weight, PackedTensor) else weight


def _described(weight: Weight) -> torch.Tensor:
    """Returns the form of a weight as numbers; zeros for floats."""
    if not isinstance(weight, PackedQuantizedTensor):
        return torch.zeros(_DESCRIBED, dtype=torch.int64)
    form = weight.form
    wide = form.scale_type == torch.float32
    numbers = [*Numbers].index(form.numbers)
    return torch.tensor([form.bits, form.group, form.has_mins, wide, numbers], dtype=torch.int64)


def _form(described: torch.Tensor) -> QuantizedForm | None:
    """Returns the form that `_described` describes; None: floats."""
    bits, group, has_mins, wide, numbers = described.tolist()
    if not bits:
        return None
    scale_type = torch.float32 if wide else torch.float16
    return QuantizedForm(bits, group, bool(has_mins), scale_type, [*Numbers][numbers])
