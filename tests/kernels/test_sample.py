"""Sampling against a plain reference of one row at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swell.kernels.sample import greedy_tokens, sample_tokens, uniform_noise

MASK = (1 << 64) - 1


def splitmix_finalizer(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(-(1 << 63), (1 << 63) - 1), position=st.integers(0, 1 << 40))
def test_noise_is_splitmix(seed, position):
    golden = 0x9E3779B97F4A7C15
    hashed = splitmix_finalizer((seed + golden) & MASK)
    hashed = splitmix_finalizer((hashed + (position + 1) * golden) & MASK)
    got = uniform_noise(torch.tensor([seed]), torch.tensor([position]))
    assert got.dtype == torch.float64
    assert got.item() == (hashed >> 11) / (1 << 53)
    assert 0 <= got.item() < 1


def test_the_finalizer_is_the_published_one():
    """The first number of SplitMix64 from state 0, as its authors print it."""
    assert splitmix_finalizer(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


def test_noise_does_not_depend_on_the_place_in_the_batch():
    seeds, positions = torch.randint(-(1 << 62), 1 << 62, (50,)), torch.randint(0, 9999, (50,))
    together = uniform_noise(seeds, positions)
    shuffle = torch.randperm(50)
    assert torch.equal(uniform_noise(seeds[shuffle], positions[shuffle]), together[shuffle])
    assert torch.equal(uniform_noise(seeds[7:8], positions[7:8]), together[7:8])


def test_noise_is_uniform_along_seeds_and_positions():
    """Chi-square of 20 bins; 43.8 is exceeded by chance once in a thousand."""
    count = torch.arange(20_000)
    for u in (
        uniform_noise(torch.zeros_like(count), count),
        uniform_noise(count, torch.zeros_like(count)),
        uniform_noise(count, count),
    ):
        observed = torch.histc(u, 20, 0, 1)
        assert ((observed - 1000) ** 2 / 1000).sum() < 43.8


def plain_keep(logits: list[float], t: float, k: int, p: float, min_p: float) -> dict[int, float]:
    """Token -> probability of those that may be drawn, by the definition."""
    weight = {i: math.exp((x - max(logits)) / t) for i, x in enumerate(logits)}
    weight = {i: w for i, w in weight.items() if w >= min_p and w > 0}
    ranked = sorted(weight, key=lambda i: (-weight[i], i))
    if k > 0:
        ranked = ranked[:k]
    total, held, kept = sum(weight[i] for i in ranked), 0.0, []
    for i in ranked:
        if kept and p < 1 and held >= p * total:
            break
        kept.append(i)
        held += weight[i]
    return {i: weight[i] / held for i in sorted(kept)}


def plain_draw(share: dict[int, float], u: float) -> int:
    total = 0.0
    for token, part in share.items():
        total += part
        if total > u:
            return token
    return max(share)


def columns_of(rows):
    """(temperature, top_k, top_p, min_p) per row -> the tensors."""
    t, k, p, m = zip(*rows, strict=True)
    return torch.tensor(t), torch.tensor(k), torch.tensor(p), torch.tensor(m)


PARAMETERS = [
    (1.0, 0, 1.0, 0.0),
    (0.0, 5, 0.5, 0.3),
    (0.7, 0, 1.0, 0.0),
    (1.3, 3, 1.0, 0.0),
    (1.0, 0, 0.6, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 1e-6, 0.0),
    (1.0, 0, 1.0, 0.2),
    (0.9, 10, 0.8, 0.05),
    (1.0, 1000, 0.999, 0.0),
]


@pytest.mark.parametrize("seed", range(5))
def test_against_the_plain_reference(seed):
    torch.manual_seed(seed)
    rows = PARAMETERS * 8
    logits = torch.randn(len(rows), 50) * 2
    logits[:, 7] = -torch.inf
    u = torch.rand(len(rows), dtype=torch.float64)
    got = sample_tokens(logits, *columns_of(rows), u).tolist()
    for row, (t, k, p, m) in enumerate(rows):
        values = logits[row].tolist()
        if t == 0:
            assert got[row] == values.index(max(values))
            continue
        assert got[row] == plain_draw(plain_keep(values, t, k, p, m), u[row].item()), rows[row]


def test_rows_do_not_depend_on_each_other():
    """Also where a neighbour makes the batch sort."""
    torch.manual_seed(0)
    logits = torch.randn(len(PARAMETERS), 300)
    u = torch.rand(len(PARAMETERS), dtype=torch.float64)
    together = sample_tokens(logits, *columns_of(PARAMETERS), u)
    for i, row in enumerate(PARAMETERS):
        alone = sample_tokens(
            logits[i : i + 1],
            *columns_of([row]),
            u[i : i + 1],
            any_min_p=row[3] > 0,
            any_top=row[1] > 0 or row[2] < 1,
        )
        assert alone.item() == together[i].item()


def test_ties_go_to_the_lower_token():
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]).repeat(200, 1)
    u = torch.linspace(0, 0.999, 200, dtype=torch.float64)
    for row, allowed in [((1.0, 2, 1.0, 0.0), {1, 2}), ((1.0, 0, 0.3, 0.0), {1, 2})]:
        got = sample_tokens(logits, *columns_of([row] * 200), u)
        assert set(got.tolist()) == allowed
    assert greedy_tokens(logits)[0] == 1


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_forbidden_tokens_are_never_drawn(u):
    logits = torch.full((1, 9), -torch.inf)
    logits[0, 4] = -3.0
    got = sample_tokens(
        logits, *columns_of([(1.0, 0, 1.0, 0.0)]), torch.tensor([u], dtype=torch.float64)
    )
    assert got.item() == 4


@pytest.mark.parametrize("temperature", [1e-30, 1e-5, 1e30])
def test_extreme_temperatures(temperature):
    logits = torch.tensor([[1e4, -1e4, 2e4, 0.0]])
    got = sample_tokens(
        logits, *columns_of([(temperature, 0, 1.0, 0.0)]), torch.tensor([0.6], dtype=torch.float64)
    )
    assert got.item() == 2


def test_distribution():
    """Chi-square of drawn tokens against the softmax: 8 tokens, 7 degrees of freedom, 24.3 is
    exceeded once in a thousand."""
    logits = torch.tensor([0.3, 1.0, -1.0, 0.0, 2.0, 0.5, -0.5, 1.5])
    count = 20_000
    seeds = torch.arange(count)
    u = uniform_noise(seeds, torch.full_like(seeds, 17))
    got = sample_tokens(logits.repeat(count, 1), *columns_of([(0.8, 0, 1.0, 0.0)] * count), u)
    expected = torch.softmax(logits / 0.8, 0) * count
    observed = torch.bincount(got, minlength=8)
    assert ((observed - expected) ** 2 / expected).sum() < 24.3


def test_logits_are_not_changed():
    logits = torch.randn(3, 20)
    before = logits.clone()
    sample_tokens(logits, *columns_of(PARAMETERS[7:10]), torch.rand(3, dtype=torch.float64))
    assert torch.equal(logits, before)
