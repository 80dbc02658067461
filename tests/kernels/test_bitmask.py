"""Token bitmasks: every backend against the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.load import load_backend

pytestmark = pytest.mark.slow

BACKENDS = ("reference", "cpu")


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=60, deadline=None)
@given(
    vocab=st.integers(1, 100),
    rows=st.lists(st.integers(0, 4), unique=True, max_size=5),
    value=st.sampled_from([float("-inf"), -1e30]),
    seed=st.integers(0, 10_000),
)
def test_definition(name, vocab, rows, value, seed):
    """The words have any bits, including the sign bit and bits beyond the vocabulary."""
    torch.manual_seed(seed)
    words = -(-vocab // 32)
    bitmask = torch.randint(-(2**31), 2**31, (len(rows), words)).to(torch.int32)
    logits = torch.randn(5, vocab)
    wanted, kept = logits.clone(), bitmask.clone()
    for i, row in enumerate(rows):
        for t in range(vocab):
            if not bitmask[i, t // 32].item() >> t % 32 & 1:
                wanted[row, t] = value
    load_backend(name, "bitmask").apply_bitmask(
        logits, bitmask, torch.tensor(rows, dtype=torch.int64), value
    )
    assert torch.equal(logits, wanted)
    assert torch.equal(bitmask, kept)
