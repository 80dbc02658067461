"""The vocabulary, split by rows among the ranks of a tensor group.

If the ranks do not divide the vocabulary, it is padded: every rank has the same number of rows, and
the last ranks may hold fewer tokens, or none. Padded rows are never looked up, and their logits are
cut off.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from swell.kernels.activation import softcap
from swell.kernels.linear import (
    embedding,
    embedding_part,
    linear,
    linear_argmax,
    pick_largest,
)
from swell.worker.comm.mesh import Group
from swell.worker.layers.packed_weight import HEAD_BITS, PackedWeight, Packing
from swell.worker.layers.weight_shard import ALL, WeightShard, empty_parameter


class _VocabRows(PackedWeight):
    """This rank's rows of a [vocab, hidden] matrix."""

    def __init__(self, vocab: int, hidden: int, group: Group) -> None:
        super().__init__()
        self.vocab, self.hidden, self.group = vocab, hidden, group
        self.rows = -(-vocab // group.size)
        self.start = group.rank * self.rows
        self.tokens = max(0, min(self.rows, vocab - self.start))
        self.weight = empty_parameter(self.rows, hidden)

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        if self.tokens:
            rows = slice(self.start, self.start + self.tokens)
            target = self.weight[: self.tokens]
            yield WeightShard(f"{name}.weight", target, (rows, ALL), (self.vocab, self.hidden))


class VocabParallelEmbedding(_VocabRows):
    """Each rank looks up the tokens that it holds; every rank gets the sum over the group."""

    def pack(self, packing: Packing) -> None:
        """Does nothing: rows are looked up unpacked, unless a tied head packs them."""

    def quantized_bits(self, packing: Packing) -> int | None:
        return None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] int, each below `vocab` -> [T, hidden]"""
        if self.group.size == 1:
            return embedding(ids, self.weight)
        return self.group.all_reduce(embedding_part(ids, self.weight, self.start))


class ParallelLMHead(_VocabRows):
    """Each rank computes the logits of its tokens; every rank gets all logits."""

    _tied: tuple[VocabParallelEmbedding, ...] = ()

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Uses the embedding's weight."""
        self.weight = embedding.weight
        self._tied = (embedding,)  # in a tuple, so that it is not registered as a submodule

    def pack(self, packing: Packing) -> None:
        if isinstance(self.weight, torch.Tensor):
            self.weight[self.tokens :] = 0.0  # no checkpoint has padded rows
        super().pack(packing)
        for tied in self._tied:
            tied.replace(self.weight)

    def quantized_bits(self, packing: Packing) -> int | None:
        return HEAD_BITS if packing.bits else None

    def forward(self, hidden: torch.Tensor, cap: float = 0.0) -> torch.Tensor:
        """hidden [S, hidden] -> logits [S, vocab] float32, bounded by `cap`; 0: not bounded"""
        own = linear(hidden, self.weight)
        logits = self.group.all_gather(softcap(own, cap) if cap else own, -1)
        logits = logits[:, : self.vocab]
        return logits if logits.dtype == torch.float32 else logits.float()

    def argmax(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [S, hidden] -> the tokens of the largest logits, [S] int64, and these logits, [S]
        float32

        Ranks exchange two numbers per row, not all logits.
        """
        if self.group.size == 1:
            values, which = linear_argmax(hidden, self.weight, self.tokens)
            return which, values
        if self.tokens:
            values, which = linear_argmax(hidden, self.weight, self.tokens)
        else:
            values = torch.full((len(hidden),), -torch.inf, device=hidden.device)
            which = torch.zeros_like(values, dtype=torch.int64)
        values, which = self.group.all_gather_columns(values, which)
        max_logits, tokens = pick_largest(values, which, self.rows)
        return tokens, max_logits
