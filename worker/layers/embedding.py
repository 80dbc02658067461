"""The vocabulary, split by rows among the ranks of a tensor group.

A vocabulary that does not divide is padded: every rank has the same number of rows, the last
ones may hold fewer (or no) words. Padded rows are never looked up, and their logits are cut off.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from swell.worker.layers.piece import ALL, Piece, empty_parameter
from swell.worker.mesh import Group


class _VocabRows(nn.Module):
    """This rank's rows of a [vocab, hidden] matrix."""

    def __init__(self, vocab: int, hidden: int, group: Group) -> None:
        super().__init__()
        self.vocab, self.hidden, self.group = vocab, hidden, group
        self.rows = -(-vocab // group.size)
        self.start = group.rank * self.rows
        self.weight = empty_parameter(self.rows, hidden)

    def pieces(self, name: str) -> Iterator[Piece]:
        end = min(self.start + self.rows, self.vocab)
        if self.start < end:
            target = self.weight[: end - self.start]
            yield Piece(
                f"{name}.weight", target, (slice(self.start, end), ALL), (self.vocab, self.hidden)
            )


class VocabParallelEmbedding(_VocabRows):
    """Each rank looks up the words it has; the sum over the group is on every rank."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] int, each below `vocab` -> [T, hidden]"""
        if self.group.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.start
        elsewhere = (local < 0) | (local >= self.rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.group.all_reduce(found.masked_fill_(elsewhere.unsqueeze(-1), 0))


class ParallelLMHead(_VocabRows):
    """Each rank computes the logits of its words; all of them are on every rank."""

    def tie(self, embedding: VocabParallelEmbedding) -> None:
        """Use the embedding's own parameter."""
        self.weight = embedding.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden] -> logits [S, vocab] float32"""
        logits = self.group.all_gather(F.linear(hidden, self.weight), -1)
        return logits[:, : self.vocab].float()
