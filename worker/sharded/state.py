"""The tensors that one worker holds, by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from swell.kernels.linear import FloatWeight, PackedTensor
from swell.worker.layers.moe import PARTS, ExpertWeight, MoE
from swell.worker.layers.packed_weight import PackedWeight
from swell.worker.model_interfaces import HoldsTensors


@dataclass
class StateTensor:
    """One tensor of a model; several modules may share it."""

    weight: FloatWeight
    layers: list[PackedWeight | ExpertWeight] = field(default_factory=list)
    """The layers that hold the tensor and can use it packed."""

    def replace(self, weight: FloatWeight) -> None:
        """Makes the model use `weight`, of equal shape and type, without a copy."""
        if isinstance(weight, PackedTensor):
            for layer in self.layers:
                layer.replace(weight)
        elif isinstance(self.weight, torch.Tensor) and self.weight.is_meta:
            for layer in self.layers:
                layer.replace(nn.Parameter(weight, requires_grad=False))
        else:
            assert isinstance(self.weight, torch.Tensor)
            self.weight.data = weight  # in place: other modules refer to the same object
        self.weight = weight


def state_of(model: HoldsTensors) -> dict[str, StateTensor]:
    """Returns the tensors that loading fills, in module order: parameters, buffers that a
    checkpoint has, and the experts that this worker holds. A shared tensor has the name of its
    first occurrence."""
    found: dict[str, StateTensor] = {}
    by_id: dict[int, StateTensor] = {}
    for path, module in model.named_modules():
        for name, weight in _own(module):
            state = by_id.get(id(weight))
            if state is None:
                state = by_id[id(weight)] = found[f"{path}.{name}"] = StateTensor(weight)
            if isinstance(module, PackedWeight) and name == "weight":
                state.layers.append(module)
        if isinstance(module, MoE):
            for expert, weights in sorted(module.local_experts.items()):
                for part, (name, weight) in enumerate(zip(PARTS, weights, strict=True)):
                    assert isinstance(weight, FloatWeight)
                    place = ExpertWeight(module.local_experts, expert, part)
                    found[f"{path}.experts.{expert}.{name}"] = StateTensor(weight, [place])
    return found


def _own(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the module's own tensors, with their names in the module."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer
    if isinstance(module, PackedWeight) and isinstance(module.weight, PackedTensor):
        yield "weight", module.weight
