"""Ranks and log probabilities."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swell.kernels.triton.logprobs import BLOCK, MOST_TOP, rank_tokens

pytestmark = pytest.mark.slow

INF = float("inf")


def launches(dtype: torch.dtype) -> Iterator[None]:
    """Launches the kernels in sizes of models. Logits are always float32."""
    for vocab, top in ((151_936, MOST_TOP), (262_144, MOST_TOP), (128_257, 0), (32_000, 1)):
        yield rank_tokens(torch.empty(3, vocab), torch.zeros(3, dtype=torch.int64), top)


def check(logits, tokens, top):
    """Asserts that the result is that of the definition in float64, and that equal logits are
    ranked by token id."""
    before = logits.clone()
    token_ids, logprobs, ranks = rank_tokens(logits, tokens, top)[:3]
    assert token_ids.dtype == ranks.dtype == torch.int64 and logprobs.dtype == torch.float32
    assert ranks.tolist() == [
        1 + int((row > row[token]).sum()) for row, token in zip(logits, tokens, strict=True)
    ]
    best = logits.argsort(dim=1, descending=True, stable=True)[:, :top]
    assert torch.equal(token_ids, torch.cat([tokens[:, None], best], 1))
    wanted = logits.double().log_softmax(1).gather(1, token_ids)
    torch.testing.assert_close(logprobs.double(), wanted, atol=1e-6, rtol=1e-6)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [1, 7, 257, BLOCK, BLOCK + 1, 2 * BLOCK + 77])
@pytest.mark.parametrize("top", [0, 1, 5, MOST_TOP])
@pytest.mark.parametrize("ties", [False, True])
def test_definition(vocab, top, ties):
    """Covers ties, zeros of both signs, impossible tokens, one token above all, one possible token,
    and rows that are parts of wider ones."""
    torch.manual_seed(vocab)
    wide = torch.randn(4, vocab + 3) * 4
    if ties:
        wide = wide.clamp(max=0).round()
    logits = wide[:, :vocab]
    logits[0, 1::3] = -INF
    logits[1, vocab // 2] = 500.0
    logits[2] = torch.where(torch.arange(vocab) == vocab - 1, -2.0, -INF)
    tokens = torch.tensor([min(1, vocab - 1), vocab - 1, vocab - 1, vocab // 3])
    check(logits, tokens, top)


def test_many_splits():
    """Ranks a vocabulary of 151 936 tokens with the same largest logit in distant splits."""
    logits = torch.randn(1, 151_936) * 3
    logits[0, [150_000, 7, 60_000]] = 20.0
    check(logits, torch.tensor([60_000]), 5)


def test_more_than_the_kernels_rank_is_left_to_the_reference():
    logits = torch.randn(2, 300)
    token_ids, logprobs, *_ = rank_tokens(logits, torch.tensor([5, 6]), MOST_TOP + 1)
    best = logits.sort(1, descending=True).indices[:, : MOST_TOP + 1]
    assert torch.equal(token_ids[:, 1:], best)
    torch.testing.assert_close(logprobs, logits.log_softmax(1).gather(1, token_ids))


def test_no_position():
    ranked = rank_tokens(torch.empty(0, 9), torch.empty(0, dtype=torch.int64), 3)
    assert [tuple(x.shape) for x in ranked[:3]] == [(0, 4), (0, 4), (0,)]


@pytest.mark.parametrize("place", [3, BLOCK + 3])
@pytest.mark.parametrize("special", [float("nan"), -float("nan"), INF])
def test_a_row_with_nan_or_infinity_has_no_log_probabilities(place, special):
    """The row gets distinct tokens of the vocabulary, as does a row without any possible token.
    Other rows do not change."""
    vocab = BLOCK + 9
    logits = torch.randn(3, vocab)
    logits[0, place] = special
    logits[0, place + 1 :] = -INF
    logits[1] = -INF
    token_ids, logprobs, *_ = rank_tokens(logits, torch.tensor([0, 1, 2]), 4)
    assert logprobs[:2].isnan().all() and logprobs[2].isfinite().all()
    assert token_ids[0, 1] == place
    assert ((token_ids >= 0) & (token_ids < vocab)).all()
    assert all(len(set(row)) == 4 for row in token_ids[:, 1:].tolist())
