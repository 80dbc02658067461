"""Layers with one large matrix, which a backend may store in its own order."""

from __future__ import annotations

from typing import Any

from torch import nn

from swell.kernels.linear import PackedTensor, Weight, pack


class PackedWeight(nn.Module):
    """A layer with a `weight` [out, in]."""

    weight: Any
    """A parameter while it is filled, then a `Weight` of `swell.kernels.linear`."""

    def pack(self) -> None:
        """Replace the filled weight by its packed form, unless it was loaded in that form."""
        if not isinstance(self.weight, PackedTensor):
            self.replace(pack(self.weight))

    def replace(self, weight: Weight) -> None:
        """Use `weight` from now on."""
        del self.weight
        self.weight = weight


def pack_weights(model: nn.Module) -> None:
    """Pack every weight of a filled model; it cannot be filled again."""
    for module in model.modules():
        if isinstance(module, PackedWeight):
            module.pack()
