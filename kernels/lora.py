"""Adds the outputs of adapters (LoRA) to those of a layer, for rows with different adapters at
once.

    y[t] += B (A x[t])        A [rank, in] and B [out, rank] of the adapter of token t

A layer of P matrices on one input (queries, keys and values) has one A, which stacks those of all
its matrices, and one B for each matrix, which reads its own part of A x:

    A x          | r0  | r1  | r2  |
    y            |  B0 A0 x  |  B1 A1 x  |  B2 A2 x  |
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swell.kernels import backends
from swell.kernels.host.device_copy import to_device


@dataclass(frozen=True)
class LoraWeights:
    """The weights of one adapter in one layer of P matrices."""

    down: Tensor
    """[sum of the ranks, in]"""
    ups: Sequence[Tensor | None]
    """P matrices, each [outputs of the matrix, its rank]; None: the adapter does not adapt that
    matrix, and `down` does not include it."""


class LoraTokens:
    """The tokens of a step that have adapters, grouped by adapter. They are at the same addresses
    in every step, where a captured step reads them."""

    def __init__(self, max_tokens: int, max_groups: int, device: torch.device) -> None:
        """`max_groups`: the most adapters of one step."""
        self.max_groups = max_groups
        self.groups: Sequence[tuple[int, int, int]] = ()
        """(adapter, begin, end): the adapter's tokens are `tokens[begin:end]`."""
        # [max_tokens], indices of tokens of the step
        self.tokens = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        # [1 + 3 * max_groups]: the number of groups, and the contents of `groups`
        self.groups_tensor = torch.zeros(1 + 3 * max_groups, dtype=torch.int64, device=device)

    def set(self, tokens_of: Mapping[int, Sequence[int]]) -> None:
        """Sets adapter -> its tokens."""
        tokens: list[int] = []
        groups = []
        for adapter in sorted(tokens_of):
            begin = len(tokens)
            tokens += tokens_of[adapter]
            groups.append((adapter, begin, len(tokens)))
        self.groups = groups
        flat = [len(groups), *itertools.chain.from_iterable(groups)]
        for target, values in ((self.groups_tensor, flat), (self.tokens, tokens)):
            target[: len(values)] = to_device(np.array(values, dtype=np.int64), target.device)


class LoraLayer(ABC):
    """The adapters of one layer, in the form that a backend uses."""

    @abstractmethod
    def set(self, adapter: int, weights: LoraWeights | None) -> None:
        """Stores an adapter under its number, instead of the previous one; None: removes it. `add`
        may be called meanwhile for tokens of other adapters."""

    @abstractmethod
    def add(self, x: Tensor, y: Tensor, tokens: LoraTokens) -> None:
        """x [T, in], y [T, out]: adds IN PLACE to the rows of y that have adapters.

        Sums are in float32. In a compiled backend, the result of a token has the same bits
        regardless of the other tokens.
        """


def make_layer(
    size: int,
    outs: Sequence[int],
    adapters: int,
    max_rank: int,
    dtype: torch.dtype,
    device: torch.device,
) -> LoraLayer:
    """Returns a layer from `size` inputs to `outs` outputs of each of its P matrices; the numbers
    of adapters are below `adapters`, and the rank of each matrix is at most `max_rank`. For tokens
    of an adapter that is not loaded, nothing is added.

    Backends: reference, cpu, triton.
    """
    made: LoraLayer = backends.get("lora", device.type).make_layer(
        size, outs, adapters, max_rank, dtype, device
    )
    return made
