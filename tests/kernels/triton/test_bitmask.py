"""Bitmasks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swell.kernels.triton.bitmask import BLOCK, apply_bitmask

pytestmark = pytest.mark.slow


def launches(dtype: torch.dtype) -> Iterator[None]:
    """Launches the kernel in sizes of models. Logits are always float32."""
    rows = torch.zeros(3, dtype=torch.int64)
    for vocab in (151_936, 128_257):
        bitmask = torch.empty(3, -(-vocab // 32), dtype=torch.int32)
        yield apply_bitmask(torch.empty(4, vocab), bitmask, rows, float("-inf"))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, BLOCK, BLOCK + 1, 2 * BLOCK + 65])
@pytest.mark.parametrize("rows", [[], [3], [4, 0, 2]], ids=str)
@pytest.mark.parametrize("value", [float("-inf"), -1e30])
def test_definition(vocab, rows, value):
    """The words have any bits, including the sign bit and bits beyond the vocabulary. Logits and
    bitmask are parts of wider tensors, whose other elements stay as they are."""
    words = -(-vocab // 32)
    bitmask = torch.randint(-(2**31), 2**31, (len(rows), words + 2)).to(torch.int32)[:, :words]
    wide = torch.randn(5, vocab + 3)
    wanted, kept = wide.clone(), bitmask.clone()
    for i, row in enumerate(rows):
        for t in range(vocab):
            if not bitmask[i, t // 32].item() >> t % 32 & 1:
                wanted[row, t] = value
    apply_bitmask(wide[:, :vocab], bitmask, torch.tensor(rows, dtype=torch.int64), value)
    assert torch.equal(wide, wanted) and torch.equal(bitmask, kept)


def test_logits_may_lie_beyond_2_to_the_31_elements():
    """Only the pages that are written take memory."""
    vocab = 1 << 20
    logits = torch.empty((1 << 31) // vocab + 2, vocab)
    last = len(logits) - 1
    logits[last, :32] = 0.0
    apply_bitmask(logits[:, :32], torch.tensor([[5]], dtype=torch.int32), torch.tensor([last]), 7.0)
    wanted = torch.full((32,), 7.0)
    wanted[[0, 2]] = 0.0
    assert torch.equal(logits[last, :32], wanted)
