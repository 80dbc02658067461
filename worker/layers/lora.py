"""The terms that adapters (LoRA) add to the outputs of linear layers.

    y[t] += scale * B (A x[t])        for each token t whose row's adapter adapts the layer

`scale` is folded into B when an adapter is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from swell.kernels.lora import LoraTokens, LoraWeights, make_layer


class LoraPart(NamedTuple):
    """One matrix of the checkpoint in a layer."""

    module: str
    """The name of the matrix in the checkpoint, without `.weight`."""
    inputs: slice
    """The columns that this rank multiplies."""
    outputs: slice
    """The rows that this rank computes."""
    shape: tuple[int, int]
    """(out, in) of the whole matrix."""


class LoraMatrices(NamedTuple):
    """The matrices of one adapter for one matrix of the checkpoint."""

    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[out, rank], multiplied by the scale"""


class AdaptedTokens(NamedTuple):
    """The tokens of a step that have adapters."""

    num_tokens: int
    """T, the number of tokens of the step; in a capture, of the largest step."""
    among_all: LoraTokens
    among_sampled: LoraTokens
    """The tokens with adapters after which a token is sampled, as indices among all S tokens after
    which one is sampled: the last layer continues with these."""

    def among(self, rows: int) -> LoraTokens:
        """Returns the adapted tokens for `rows` rows, T or S. If T = S, both sets are the same."""
        return self.among_all if rows == self.num_tokens else self.among_sampled


@dataclass
class ActiveAdapters:
    """The adapters of the current step, shared by all layers of a model."""

    tokens: AdaptedTokens | None = None


class NoLora:
    """A layer without adapters."""

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Adds what the step's adapters compute for x [T, in] to y [T, out], in place; returns
        y."""
        return y


NO_LORA = NoLora()


class LayerLora(NoLora):
    """All adapters of one layer: this rank's part of each."""

    def __init__(
        self,
        active: ActiveAdapters,
        parts: Sequence[LoraPart],
        adapters: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`parts`: the matrices of the layer; `adapters`: the number of adapters; `max_rank`: the
        largest rank of one of their matrices."""
        self.parts = parts
        self.ins = parts[0].inputs.stop - parts[0].inputs.start
        self.outs = [part.outputs.stop - part.outputs.start for part in parts]
        self._active = active
        self._layer = make_layer(self.ins, self.outs, adapters, max_rank, dtype, device)

    def load(self, adapter: int, found: Sequence[LoraMatrices | None]) -> int:
        """Stores an adapter and returns its bytes. `found`: one entry for each part, None if the
        adapter does not adapt it. Steps that do not use this adapter may be computed meanwhile."""
        downs = [
            matrices.a[:, part.inputs]
            for part, matrices in zip(self.parts, found, strict=True)
            if matrices is not None
        ]
        if not downs:
            return 0
        ups = [
            None if matrices is None else matrices.b[part.outputs].contiguous()
            for part, matrices in zip(self.parts, found, strict=True)
        ]
        weights = LoraWeights(torch.cat(downs).contiguous(), ups)
        self._layer.set(adapter, weights)
        return weights.down.nbytes + sum(up.nbytes for up in ups if up is not None)

    def unload(self, adapter: int) -> None:
        """Drops an adapter that no step uses."""
        self._layer.set(adapter, None)

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        if self._active.tokens is not None:
            self._layer.add(x, y, self._active.tokens.among(len(x)))
        return y
