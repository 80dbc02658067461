"""Penalties: every backend against the definition, and against transformers' repetition penalty."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from tests.kernels.load import load_backend

pytestmark = pytest.mark.slow

BACKENDS = ("reference", "cpu")
ROWS, MAX_ROWS, VOCAB = 6, 9, 23


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=40, deadline=None)
@given(
    places=st.dictionaries(
        st.integers(0, ROWS - 1), st.integers(0, MAX_ROWS - 1), min_size=1, max_size=ROWS
    ),
    seed=st.integers(0, 10_000),
)
def test_definition(name, places, seed):
    """Equal to the definition bit for bit, in float32; rows that are not named stay as they are."""
    torch.manual_seed(seed)
    logits = torch.randn(ROWS, VOCAB) * 4
    counts = torch.randint(0, 3, (MAX_ROWS, VOCAB), dtype=torch.int32)
    seen = (counts > 0) | (torch.rand(MAX_ROWS, VOCAB) < 0.4)
    strengths = torch.rand(3, len(places)) * 3 - torch.tensor([0.0, 1.5, 1.5])[:, None] + 1e-3
    wanted = logits.numpy().copy()
    for i, (row, slot) in enumerate(places.items()):
        repetition, frequency, presence = strengths[:, i].numpy()
        for t in range(VOCAB):
            x, count = wanted[row, t], int(counts[slot, t])
            if seen[slot, t]:
                x = x / repetition if x > 0 else x * repetition
            off = frequency * np.float32(count) + presence * np.float32(count > 0)
            wanted[row, t] = x - off
    before = counts.clone(), seen.clone()
    load_backend(name, "penalties").apply_penalties(
        logits,
        torch.tensor(list(places)),
        torch.tensor(list(places.values())),
        counts,
        seen,
        *strengths,
    )
    assert np.array_equal(logits.numpy(), wanted)
    assert torch.equal(counts, before[0])
    assert torch.equal(seen, before[1])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.7])
def test_transformers_repetition_penalty(name, penalty):
    torch.manual_seed(0)
    logits = torch.randn(3, VOCAB)
    prompt, output = torch.randint(0, VOCAB, (3, 7)), torch.randint(0, VOCAB, (3, 4))
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    wanted = processor(torch.cat((prompt, output), 1), logits.clone())
    counts = torch.zeros(3, VOCAB, dtype=torch.int32)
    counts.scatter_add_(1, output, torch.ones_like(output, dtype=torch.int32))
    seen = (counts > 0).scatter_(1, prompt, True)
    off, rows = torch.zeros(3), torch.arange(3)
    load_backend(name, "penalties").apply_penalties(
        logits, rows, rows, counts, seen, torch.full((3,), penalty), off, off
    )
    assert torch.equal(logits, wanted)


@pytest.mark.parametrize("name", BACKENDS)
def test_impossible_tokens_stay_impossible(name):
    """A logit of -inf is unchanged, and none becomes NaN."""
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -1.0]])
    one = torch.ones(1)
    load_backend(name, "penalties").apply_penalties(
        logits,
        torch.tensor([0]),
        torch.tensor([0]),
        torch.ones(1, 4, dtype=torch.int32),
        torch.ones(1, 4, dtype=torch.bool),
        one * 2,
        one,
        one,
    )
    assert logits.tolist() == [[-torch.inf, -2.0, -1.5, -4.0]]


@pytest.mark.parametrize("name", BACKENDS)
def test_counting(name):
    """Equal pairs are counted each time; other slots and tokens stay as they are."""
    counts = torch.zeros(MAX_ROWS, VOCAB, dtype=torch.int32)
    seen = torch.zeros(MAX_ROWS, VOCAB, dtype=torch.bool)
    seen[2, 5] = True
    pairs = [(0, 0), (2, 5), (2, 5), (8, 22), (2, 4)]
    load_backend(name, "penalties").count_tokens(counts, seen, *torch.tensor(pairs).T.contiguous())
    assert counts.nonzero().tolist() == seen.nonzero().tolist() == sorted(map(list, set(pairs)))
    assert counts[2, 5] == 2
    assert counts.sum() == len(pairs)
