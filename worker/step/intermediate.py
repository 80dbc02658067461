"""The activations between pipeline stages, and the layers of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class IntermediateTensors:
    """The activations between two stages, in the order in which they are sent."""

    hidden_states: torch.Tensor
    """[T, hidden]"""
    residual: torch.Tensor | None = None
    """[T, hidden], a sum to which `hidden_states` must still be added; None: the model does not use
    it."""
    layer_inputs: Sequence[torch.Tensor] = ()
    """[T, hidden] each: the captured inputs of earlier layers (see `LayerTaps`)."""

    def tensors(self) -> list[torch.Tensor]:
        return [t for t in (self.hidden_states, self.residual, *self.layer_inputs) if t is not None]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> IntermediateTensors:
        """Returns the same activations in other tensors, in the order of `tensors()`."""
        hidden_states, *others = tensors
        residual = None if self.residual is None else others.pop(0)
        return IntermediateTensors(hidden_states, residual, others)

    def first(self, tokens: int) -> IntermediateTensors:
        """Returns views of the activations of the first tokens."""
        return self.with_tensors([tensor[:tokens] for tensor in self.tensors()])


def stage_layers(layers: int, stages: int, stage: int) -> range:
    """Returns the contiguous layers of one stage; the first stages have one more layer if the
    number of stages does not divide that of layers.

    Raises `ValueError` if there are fewer layers than stages.
    """
    if layers < stages:
        raise ValueError(
            f"parallel.pipeline={stages} is above the model's num_hidden_layers={layers}; "
            f"set parallel.pipeline to {layers} or less"
        )
    each, extra = divmod(layers, stages)
    start = stage * each + min(stage, extra)
    return range(start, start + each + (stage < extra))
