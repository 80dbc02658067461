"""Layers with one large matrix, which a backend may store in its own order."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from torch import nn

from swell.kernels.linear import PackedTensor, Weight, pack
from swell.worker.model_interfaces import HoldsTensors


class Packable(nn.Module):
    """A layer whose weights are packed once they are loaded."""

    def pack(self, exact: bool) -> None:
        """Replaces loaded weights by their packed form, unless they were loaded in that form.
        `exact`: see `swell.kernels.linear.pack`."""
        raise NotImplementedError


class PackedWeight(Packable):
    """A layer with a `weight` [out, in]."""

    weight: Any
    """A parameter while it is loaded, then a `Weight` of `swell.kernels.linear`."""

    def pack(self, exact: bool) -> None:
        if not isinstance(self.weight, PackedTensor):
            self.replace(pack(self.weight, exact))

    def replace(self, weight: Weight) -> None:
        """Uses `weight` from now on."""
        del self.weight
        self.weight = weight


def pack_weights(model: HoldsTensors, exact: bool = False) -> None:
    """Packs every weight of a loaded model, and those that several modules share once. Afterwards
    the model cannot be loaded again."""
    by_weight: dict[int, list[PackedWeight]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, PackedWeight):
            by_weight[id(module.weight)].append(module)
        elif isinstance(module, Packable):
            module.pack(exact)
    for sharing in by_weight.values():
        for module in sharing:
            module.pack(exact)
            if isinstance(packed := module.weight, PackedTensor):
                for other in sharing:
                    if other.weight is not packed:
                        other.replace(packed)
                break
