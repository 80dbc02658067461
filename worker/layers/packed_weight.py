"""Layers around one large matrix, which may be kept in the order that the device reads fastest."""

from __future__ import annotations

from typing import Any

from torch import nn

from swell.kernels.linear import Weight, pack


class PackedWeight(nn.Module):
    """A layer with a `weight` [out, in]."""

    weight: Any
    """A parameter while it is filled, then what `swell.kernels.linear` takes."""

    def pack(self) -> None:
        """The weight is filled: keep it as it is computed with, and in no other form."""
        self.replace(pack(self.weight))

    def replace(self, weight: Weight) -> None:
        """Compute with `weight` from now on."""
        del self.weight
        self.weight = weight


def pack_weights(model: nn.Module) -> None:
    """Pack every weight of a filled model; it cannot be filled again."""
    for module in model.modules():
        if isinstance(module, PackedWeight):
            module.pack()
