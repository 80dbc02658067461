"""A vocabulary in shards: all ranks together find the same tokens as a single rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from swell.configs.schema import ParallelConfig
from swell.worker.comm.mesh import Group, Mesh, SoloGroup
from swell.worker.layers.embedding import ParallelLMHead
from swell.worker.layers.packed_weight import FLOATS
from swell.worker.layers.weight_shard import materialize
from tests.support.deadlines import HANG_S
from tests.worker.comm.test_mesh import in_threads

pytestmark = pytest.mark.slow

HIDDEN, ROWS = 8, 40


def filled(weight: torch.Tensor, group: Group) -> ParallelLMHead:
    """Returns a head that holds this rank's part of [vocab, hidden]."""
    head = ParallelLMHead(*weight.shape, group)
    materialize(head, weight.device, weight.dtype)
    with torch.no_grad():
        head.weight.zero_()
        for shard in head.weight_shards("head"):
            shard.target.copy_(weight[shard.index])
    head.pack(FLOATS)
    return head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 3, 4, 7, 100])
@pytest.mark.parametrize("ranks", [2, 3])
def test_argmax_over_ranks(ranks, vocab, dtype):
    """The argmax over ranks is exact for vocabularies that do not divide, ranks without a row,
    equal logits on several ranks, and logits that are all below zero, the value of padding rows."""
    torch.manual_seed(vocab)
    weight = -torch.randint(1, 4, (vocab, HIDDEN)).to(dtype)
    hidden = torch.randint(1, 3, (ROWS, HIDDEN)).to(dtype)
    alone = filled(weight, SoloGroup())
    logits, (wanted, max_logits) = alone(hidden), alone.argmax(hidden)
    assert wanted.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert max_logits.tolist() == [max(row) for row in logits.tolist()]
    store = dist.HashStore()

    def work(rank: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        mesh = Mesh.build(ParallelConfig(tensor=ranks), rank, store, timeout_s=HANG_S)
        try:
            head = filled(weight, mesh.tensor)
            return head(hidden), head.argmax(hidden)
        finally:
            mesh.close()

    for found, (words, largest) in in_threads(ranks, work):
        assert torch.equal(found, logits)
        assert words.dtype == torch.int64 and torch.equal(words, wanted)
        assert largest.dtype == torch.float32 and torch.equal(largest, max_logits)
