"""The vocabulary, split by rows among the ranks of a tensor group.

If the ranks do not divide the vocabulary, it is padded: every rank has the same number of rows, and
the last ranks may hold fewer tokens, or none. Padded rows are never looked up, and their logits are
cut off.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from swell.kernels.linear import embedding, linear, linear_argmax
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
        local = ids - self.start
        elsewhere = (local < 0) | (local >= self.rows)
        found = embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.group.all_reduce(found.masked_fill_(elsewhere.unsqueeze(-1), 0))


class ParallelLMHead(_VocabRows):
    """Each rank computes the logits of its tokens; every rank gets all logits."""

    _tied: tuple[VocabParallelEmbedding, ...] = ()

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Uses the embedding's weight."""
        self.weight = embedding.weight
        self._tied = (embedding,)  # in a tuple, so that it is not registered as a submodule

    def pack(self, packing: Packing) -> None:
        super().pack(packing)
        for tied in self._tied:
            tied.replace(self.weight)

    def quantized_bits(self, packing: Packing) -> int | None:
        return HEAD_BITS if packing.bits else None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden] -> logits [S, vocab] float32"""
        logits = self.group.all_gather(linear(hidden, self.weight), -1)
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
            values = hidden.new_full((len(hidden),), -torch.inf)
            which = torch.zeros_like(values)
        # [1, S, 2]; both fit into a float64
        pairs = torch.stack((values.double(), which.double() + self.start), -1).unsqueeze(0)
        values, tokens = self.group.all_gather(pairs, 0).unbind(-1)
        # `max` treats NaN as the largest value.
        max_logits, ranks = values.max(0, keepdim=True)
        return tokens.gather(0, ranks)[0].long(), max_logits[0].float()
