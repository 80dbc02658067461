"""Noise and sampling: the tokens are those of the reference, whose own tests compare it with the
definition."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from swell.kernels.reference import sample as reference
from swell.kernels.triton import sample
from swell.kernels.triton.sample import NUMBERS, greedy_sample, sample_tokens, uniform_noise
from tests.kernels.test_sample import PARAMETERS, tensors
from tests.kernels.triton.oracle import TYPES

pytestmark = pytest.mark.slow

INF = float("inf")
FILTERS = [row for row in PARAMETERS if row[1] > 0 or row[2] < 1]


def launches(dtype: torch.dtype) -> Iterator[None]:
    """Launches the kernels in sizes of models. Only greedy sampling accepts 16-bit logits."""
    whole, numbers = torch.zeros(3, 3, dtype=torch.int64)[:, 1], torch.ones(3, 3)[:, 1]
    for vocab in (151_936, 262_144, 128_257):
        yield greedy_sample(torch.empty(3, vocab, dtype=dtype))
    if dtype == torch.float32:
        u = uniform_noise(whole, whole)
        params = numbers, whole, numbers, numbers, u
        for vocab in (151_936, 262_144, 128_257):
            for any_top in (True, False):
                yield sample_tokens(torch.empty(3, vocab), *params, any_top_k_or_p=any_top)


@pytest.fixture
def small_blocks(monkeypatch):
    """Splits rows into many small parts."""
    monkeypatch.setattr(sample, "BLOCK", 16)
    monkeypatch.setattr(sample, "PASS_BLOCK", 64)


def equals_the_reference(logits, rows, u, any_top=True):
    """Asserts that tokens and largest logits are equal to those of the reference. The parameters
    are columns of wider tensors."""
    before, u = logits.clone(), torch.as_tensor(u, dtype=torch.float64).expand(len(rows))
    params = tensors(rows)
    floats = torch.stack([params[0], params[2], params[3]], 1)
    columns = floats[:, 0], torch.stack([params[1]] * 2, 1)[:, 1], floats[:, 1], floats[:, 2]
    tokens, largest = sample_tokens(logits, *columns, u, any_top_k_or_p=any_top)
    wanted, most = reference.sample_tokens(logits, *params, u)
    assert tokens.dtype == torch.int64 and largest.dtype == torch.float32
    assert tokens.tolist() == wanted.tolist()
    assert torch.equal(largest, most) and torch.equal(logits, before)


@pytest.mark.parametrize("count", [0, 1, NUMBERS, 2 * NUMBERS + 9])
def test_noise_has_the_same_bits_as_that_of_the_reference(count):
    table = torch.randint(-(2**63), 2**63 - 1, (count, 3))
    positions = torch.randint(1 << 40, (2, count))[1]
    wanted = reference.uniform_noise(table[:, 1], positions)
    assert torch.equal(uniform_noise(table[:, 1], positions), wanted)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("vocab", [1, 15, 16, 257])
def test_greedy(small_blocks, vocab, dtype):
    """The first of equal logits is selected, also if the equal logits are zeros of both signs in
    distant splits. Rows are parts of wider ones."""
    logits = torch.randn(5, vocab + 3).to(dtype)[:, :vocab]
    logits[1] = -INF
    logits[2, vocab // 2] = INF
    logits[3] = logits[3].clamp(max=-1.0)
    logits[3, [vocab // 3, vocab - 1]] = torch.tensor([-0.0, 0.0], dtype=dtype)
    logits[4] = 2.5
    tokens, largest = greedy_sample(logits)
    assert tokens.dtype == torch.int64 and largest.dtype == torch.float32
    assert tokens.tolist() == logits.argmax(1).tolist()
    assert torch.equal(largest, logits.amax(1).float())


def test_greedy_rows_with_nan_are_reported(small_blocks):
    logits = torch.randn(3, 40)
    logits[0, 3], logits[1, 39], logits[1, 2] = float("nan"), -float("nan"), INF
    tokens, largest = greedy_sample(logits)
    assert largest.isnan().tolist() == [True, True, False]
    assert ((tokens >= 0) & (tokens < 40)).all()


def test_other_types_and_no_rows():
    logits = torch.randn(2, 9, dtype=torch.float64)
    assert torch.equal(greedy_sample(logits)[0], logits.argmax(1))
    none = torch.empty(0, 9)
    assert [len(x) for x in greedy_sample(none)] == [0, 0]
    assert [len(x) for x in sample_tokens(none, *tensors(PARAMETERS), none[:, 0].double())] == [
        0,
        0,
    ]


@pytest.mark.parametrize("vocab", [1, 16, 17, 91])
@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_the_inverse_of_the_distribution(small_blocks, vocab, u):
    """Samples from rows with impossible tokens, with only one possible token, and with equal
    logits, from a greedy row, and from rows where min_p or underflow excludes all other tokens."""
    logits = torch.randn(6, vocab + 3)[:, :vocab] * 4
    logits[0, 1::3] = -INF
    logits[1, : vocab - 1] = -INF
    logits[2] = 1.0
    rows = [(1.0, 0, 1.0, 0.0)] * 3 + [(0.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 1.0), (1e-38, 0, 1.0, 0.0)]
    equals_the_reference(logits, rows, u, any_top=False)


@pytest.mark.parametrize("row", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [5, 64, 201])
def test_filters(small_blocks, vocab, row):
    """Samples from logits with many ties and from distinct ones, both with impossible tokens."""
    torch.manual_seed(vocab)
    logits = torch.randn(2, vocab) * 3
    logits[0] = logits[0].round()
    logits[torch.rand(logits.shape) < 0.1] = -INF
    logits[:, 2] = 1.0
    equals_the_reference(logits, [row] * 2, torch.rand(2))


@pytest.mark.parametrize("row", [(1.0, 3, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 4, 0.6, 0.0)])
def test_ties_at_the_edge_go_to_the_lower_token(small_blocks, row):
    """Keeps three of five equal tokens, which are in two blocks, and does not filter a greedy row
    of the same step."""
    logits = torch.full((2, 100), -1000.0)
    logits[:, [9, 30, 70, 71, 99]] = 2.0
    for u in (0.3, 1 - 2**-53):
        equals_the_reference(logits, [row, (0.0, *row[1:])], u)


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1.0, 1e30])
def test_extreme_temperatures(temperature):
    logits = torch.tensor([[1e4, -1e4, 2e4, 0.0, 2e4, -INF]])
    equals_the_reference(logits, [(temperature, 4, 0.7, 0.0)], 0.6)


@pytest.mark.parametrize("scaled", [-86.0, -88.0, -103.0])
def test_a_weight_that_underflows_is_never_sampled(scaled):
    """Samples at u = 0, where any weight above 0 would be sampled."""
    logits = torch.tensor([[scaled * 0.01, -INF, 0.0]] * 2)
    equals_the_reference(logits, [(0.01, 0, 1.0, 0.0), (0.01, 2, 1.0, 0.0)], 0.0)


def test_a_large_vocabulary():
    """Samples from 151 936 tokens, with the real sizes of splits and blocks."""
    torch.manual_seed(1)
    logits = torch.randn(2, 151_936) * 3
    equals_the_reference(logits, [(1.0, 0, 1.0, 0.0), (0.8, 50, 0.9, 0.0)], torch.rand(2))


@pytest.mark.parametrize("row", [(1.0, 0, 1.0, 0.0), (0.9, 10, 0.8, 0.05), (0.0, 0, 1.0, 0.0)])
def test_a_row_that_cannot_be_sampled_gets_a_token_of_the_vocabulary(small_blocks, row):
    """Samples from rows with NaN in their first or last split, with +inf, and without any possible
    token, followed by a row that the others must not change."""
    logits = torch.randn(6, 50)
    logits[0, 0], logits[1, 49], logits[2, 20] = float("nan"), -float("nan"), INF
    logits[3], logits[4] = -INF, float("nan")
    u = torch.full((6,), 0.5, dtype=torch.float64)
    tokens, largest = sample_tokens(logits, *tensors([row] * 6), u)
    assert ((tokens >= 0) & (tokens < 50)).all()
    assert largest.isfinite().tolist() == [False] * 5 + [True]
    equals_the_reference(logits[5:], [row], 0.5)
