"""Adapters in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swell.kernels.lora import LoraLayer, LoraTokens, LoraWeights


class ReferenceLora(LoraLayer):
    """See `swell.kernels.lora.LoraLayer`."""

    def __init__(self, outs: Sequence[int]) -> None:
        self._outs = outs
        self._adapters: dict[int, LoraWeights] = {}

    def set(self, adapter: int, weights: LoraWeights | None) -> None:
        if weights is None:
            self._adapters.pop(adapter, None)
        else:
            self._adapters[adapter] = weights

    def add(self, x: Tensor, y: Tensor, tokens: LoraTokens) -> None:
        for adapter, begin, end in tokens.groups:
            weights = self._adapters.get(adapter)
            if weights is None:
                continue
            indices = tokens.tokens[begin:end]
            down = x[indices].float() @ weights.down.float().T
            rank = first = 0
            for up, outs in zip(weights.ups, self._outs, strict=True):
                if up is not None:
                    part = down[:, rank : rank + up.shape[1]] @ up.float().T
                    columns = slice(first, first + outs)
                    y[indices, columns] = (y[indices, columns].float() + part).to(y.dtype)
                    rank += up.shape[1]
                first += outs


def make_layer(
    size: int,
    outs: Sequence[int],
    adapters: int,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LoraLayer:
    """See `swell.kernels.lora.make_layer`."""
    return ReferenceLora(outs)
