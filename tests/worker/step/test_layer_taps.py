"""Taps return the inputs of the selected layers, however stages divide the layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from swell.worker.models.generic.parallel import decoder_layers
from swell.worker.step.intermediate import stage_layers
from swell.worker.step.layer_taps import LayerTaps

LAYERS = 6


def compute(stages: list[LayerTaps], first: int) -> list[Tensor]:
    """Computes a step in which layer i reads `first + i`; the result is that of the last stage."""
    arriving: list[Tensor] = []
    for stage, taps in enumerate(stages):
        assert taps.num_earlier == len(arriving)
        taps.begin(arriving)
        for layer in stage_layers(LAYERS, len(stages), stage):
            if layer in taps.tapped:
                taps.record(torch.tensor([first + layer]))
        if stage < len(stages) - 1:
            arriving = taps.leaving()
    return stages[-1].take()


@pytest.mark.parametrize("stages", range(1, LAYERS + 1))
@pytest.mark.parametrize("layers", [[], [0], [5], [1, 4, 2], [3, 3, 0], [5, 4, 3, 2, 1, 0]])
def test_the_last_stage_has_all_inputs_in_the_order_of_their_selection(
    layers: list[int], stages: int
) -> None:
    all_taps = [LayerTaps(stage_layers(LAYERS, stages, stage)) for stage in range(stages)]
    for taps in all_taps:
        taps.select(layers)
    for first in (100, 200):
        assert [int(x) for x in compute(all_taps, first)] == [first + layer for layer in layers]


def test_a_step_that_failed_leaves_nothing() -> None:
    taps = LayerTaps(range(LAYERS))
    taps.select([1, 2])
    taps.begin([])
    taps.record(torch.tensor([7]))
    assert [int(x) for x in compute([taps], 100)] == [101, 102]


def test_without_a_selection_nothing_is_captured() -> None:
    taps = LayerTaps(range(LAYERS))
    assert not taps.tapped and not taps.num_earlier and not taps.take()


class Model(nn.Module):
    """A model with a list of layers, and in each layer a list of as many experts."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            layers = nn.ModuleList(nn.Module() for _ in range(2))
            for layer in layers:
                layer.experts = nn.ModuleList(nn.Module() for _ in range(2))
            self.add_module(name, layers)


def test_the_layer_list_is_found_by_its_length() -> None:
    model = Model("layers")
    assert decoder_layers(model, 2) is model.layers
    for other, count in ((model, 3), (Model("layers", "others"), 2)):
        with pytest.raises(ValueError, match="inputs of its layers cannot be captured"):
            decoder_layers(other, count)
