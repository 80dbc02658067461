"""Penalties, and the counts that they use."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from swell.kernels.triton.penalties import BLOCK, PAIRS, apply_penalties, count_tokens

pytestmark = pytest.mark.slow

MAX_ROWS = 6


def launches(dtype: torch.dtype) -> Iterator[None]:
    """Launches the kernels in sizes of models. Logits are always float32."""
    rows, strength = torch.zeros(3, dtype=torch.int64), torch.ones(3)
    for vocab in (151_936, 128_257):
        counts = torch.empty(4, vocab, dtype=torch.int32)
        tables = (counts, torch.empty(4, vocab, dtype=torch.bool))
        yield apply_penalties(
            torch.empty(4, vocab), rows, rows, *tables, strength, strength, strength
        )
        yield count_tokens(*tables, rows, rows)


def definition(logits, rows, slots, counts, seen, strengths):
    """Returns the logits by the formula of `kernels/penalties.py`, rounded to float32 after each
    operation."""
    wanted = logits.numpy().copy()
    for i, (row, slot) in enumerate(zip(rows, slots, strict=True)):
        repetition, frequency, presence = strengths[:, i].numpy()
        x, n = wanted[row], counts[slot].numpy().astype(np.float32)
        repeated = np.where(x > 0, x / repetition, x * repetition)
        x = np.where(seen[slot].numpy(), repeated, x)
        wanted[row] = x - (frequency * n + presence * (n > 0).astype(np.float32))
    return torch.from_numpy(wanted)


@pytest.mark.parametrize("vocab", [1, 33, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize(("rows", "slots"), [([], []), ([4], [0]), ([3, 0, 1], [5, 5, 2])], ids=str)
def test_definition(vocab, rows, slots):
    """Equal bit for bit, in float32; rows that are not named stay as they are. Tables and logits
    are parts of wider tensors."""
    logits = (torch.randn(5, vocab + 3) * 4)[:, :vocab]
    logits[:, ::7] = -torch.inf
    counts = torch.randint(0, 3, (MAX_ROWS, vocab + 5), dtype=torch.int32)[:, :vocab]
    seen = (counts > 0) | (torch.rand(MAX_ROWS, vocab) < 0.4)
    strengths = torch.rand(3, len(rows)) * 3 - torch.tensor([0.0, 1.5, 1.5])[:, None] + 1e-3
    wanted = definition(logits, rows, slots, counts, seen, strengths)
    before = counts.clone(), seen.clone()
    indices = (torch.tensor(x, dtype=torch.int64) for x in (rows, slots))
    apply_penalties(logits, *indices, counts, seen, *strengths)
    assert torch.equal(logits, wanted)
    assert torch.equal(counts, before[0]) and torch.equal(seen, before[1])


@pytest.mark.parametrize("pairs", [0, 1, PAIRS, PAIRS + 9])
def test_counting(pairs):
    """Equal pairs are counted each time, in one program and in two; what was counted and seen
    before stays."""
    vocab = 5
    counts = torch.randint(0, 3, (MAX_ROWS, vocab), dtype=torch.int32)
    seen = torch.rand(MAX_ROWS, vocab) < 0.3
    wanted, marked = counts.clone(), seen.clone()
    slots, tokens = torch.randint(4, (pairs,)), torch.randint(vocab, (pairs,))
    for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
        wanted[slot, token] += 1
        marked[slot, token] = True
    count_tokens(counts, seen, slots, tokens)
    assert torch.equal(counts, wanted) and torch.equal(seen, marked)
