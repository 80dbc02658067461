"""Ranks and log probabilities: every backend against arithmetic in float64."""

from __future__ import annotations

import pytest
import torch

from swell.kernels.logprobs import LogprobsTensors
from tests.kernels.load import load_backend

pytestmark = pytest.mark.slow

BACKENDS = ("reference", "cpu")


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("vocab", [1, 7, 33, 257, 3000])
@pytest.mark.parametrize("top", [0, 1, 5, 300, 9999])
@pytest.mark.parametrize("ties", [False, True])
def test_definition(name, vocab, top, ties):
    """Covers ties and tails, impossible tokens, and rows that are slices of wider ones."""
    torch.manual_seed(vocab)
    wide = torch.randn(6, vocab + 3) * 4
    if ties:
        wide = wide.round()
    logits = wide[:, :vocab]
    logits[1, : vocab - 1] = -torch.inf
    tokens = torch.randint(vocab, (6,))
    ranked = load_backend(name, "logprobs").rank_tokens(logits, tokens, top)
    token_ids, logprobs, ranks = ranked[:3]
    exact = logits.double().log_softmax(1)
    assert token_ids.shape == (6, 1 + min(top, vocab))
    assert ranks.tolist() == [
        1 + int((row > row[token]).sum()) for row, token in zip(logits, tokens, strict=True)
    ]
    assert torch.equal(token_ids[:, 0], tokens)
    torch.testing.assert_close(logprobs.double(), exact.gather(1, token_ids), atol=2e-6, rtol=2e-6)
    best = token_ids[:, 1:]
    assert all(len(set(row)) == len(row) for row in best.tolist())
    wanted = logits.sort(1, descending=True).values[:, :top]
    assert torch.equal(logits.gather(1, best), wanted)


def test_the_positions_of_each_request_are_found():
    """Positions are found after those of rejected drafts were removed, also for a request without
    any. Without the list of ends, each request has one position."""
    ranked = LogprobsTensors(
        torch.arange(6)[:, None], -torch.arange(6.0)[:, None], torch.arange(6), [0, 1, 4, 6]
    )
    found = ranked.filter([True, True, False, True, False, False])
    assert found.cu_num_generated_tokens == [0, 1, 3, 3]
    lists = found.to_cpu_nonblocking().tolists()
    assert [lists.slice_request(i).selected_token_ranks for i in range(3)] == [[0], [1, 3], []]
    assert lists.slice_request(1)[:2] == ([[1], [3]], [[-1.0], [-3.0]])
    single = LogprobsTensors(*ranked[:3]).filter([False, True] * 3)
    assert single.cu_num_generated_tokens is None
    assert single.tolists().slice_request(2).selected_token_ranks == [5]
