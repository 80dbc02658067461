"""Sampling against a plain reference of one row at a time."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from swell.kernels.reference import sample as reference
from swell.kernels.sample import filter_logits
from tests.kernels.load import load_backend

pytestmark = pytest.mark.slow

MASK = (1 << 64) - 1


@pytest.fixture(params=["reference", "cpu"])
def backend(request):
    return load_backend(request.param, "sample")


def splitmix_finalizer(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(-(1 << 63), (1 << 63) - 1), position=st.integers(0, 1 << 40))
def test_noise_equals_splitmix(backend, seed, position):
    golden = 0x9E3779B97F4A7C15
    hashed = splitmix_finalizer((seed + golden) & MASK)
    hashed = splitmix_finalizer((hashed + (position + 1) * golden) & MASK)
    got = backend.uniform_noise(torch.tensor([seed]), torch.tensor([position]))
    assert got.dtype == torch.float64
    assert got.item() == (hashed >> 11) / (1 << 53)
    assert 0 <= got.item() < 1


def test_the_finalizer_is_the_published_one():
    """The finalizer returns the first number of SplitMix64 from state 0, as its authors publish
    it."""
    assert splitmix_finalizer(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF


def test_noise_does_not_depend_on_the_place_in_the_batch(backend):
    seeds, positions = torch.randint(-(1 << 62), 1 << 62, (50,)), torch.randint(0, 9999, (50,))
    together = backend.uniform_noise(seeds, positions)
    shuffle = torch.randperm(50)
    assert torch.equal(backend.uniform_noise(seeds[shuffle], positions[shuffle]), together[shuffle])
    assert torch.equal(backend.uniform_noise(seeds[7:8], positions[7:8]), together[7:8])


def test_noise_is_uniform_along_seeds_and_positions(backend):
    """A chi-square test of 20 bins; 43.8 is exceeded by chance once in a thousand."""
    count = torch.arange(20_000)
    for u in (
        backend.uniform_noise(torch.zeros_like(count), count),
        backend.uniform_noise(count, torch.zeros_like(count)),
        backend.uniform_noise(count, count),
    ):
        observed = torch.histc(u, 20, 0, 1)
        assert ((observed - 1000) ** 2 / 1000).sum() < 43.8


def reference_filter(
    logits: list[float], t: float, k: int, p: float, min_p: float
) -> dict[int, float]:
    """Returns token -> probability of the tokens that may be sampled, by the definition."""
    weight = {i: math.exp((x - max(logits)) / t) for i, x in enumerate(logits)}
    weight = {i: w for i, w in weight.items() if w >= max(min_p, math.exp(-87))}
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


def reference_sample(share: dict[int, float], u: float) -> int:
    total = 0.0
    for token, part in share.items():
        total += part
        if total > u:
            return token
    return max(share)


def tokens_of(module, *rows, **options):
    """Returns the sampled tokens."""
    tokens, max_logits = module.sample_tokens(*rows, **options)
    assert torch.equal(max_logits, rows[0].amax(-1)) or not torch.isfinite(rows[0].amax(-1)).all()
    return tokens


def tensors(rows):
    """Converts (temperature, top_k, top_p, min_p) of each row to tensors."""
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
def test_against_the_plain_reference(backend, seed):
    torch.manual_seed(seed)
    rows = PARAMETERS * 8
    logits = torch.randn(len(rows), 50) * 2
    logits[:, 7] = -torch.inf
    u = torch.rand(len(rows), dtype=torch.float64)
    got = tokens_of(backend, logits, *tensors(rows), u).tolist()
    for row, (t, k, p, m) in enumerate(rows):
        values = logits[row].tolist()
        if t == 0:
            assert got[row] == values.index(max(values))
            continue
        assert got[row] == reference_sample(reference_filter(values, t, k, p, m), u[row].item()), (
            rows[row]
        )


@pytest.mark.parametrize("seed", range(3))
def test_filtered_logits_have_the_sampled_distribution(seed):
    """Their probabilities are those of the definition. A row without temperature is not changed, a
    sampled token is always kept, and NaN stays NaN."""
    torch.manual_seed(seed)
    rows = PARAMETERS * 4
    logits = torch.randn(len(rows), 50) * 2
    logits[:, 7] = -torch.inf
    before, sampled = logits.clone(), logits.argmax(1)
    found = filter_logits(logits, *tensors(rows), sampled)
    assert torch.equal(logits, before)
    for row, (t, k, p, m) in enumerate(rows):
        if t == 0:
            assert torch.equal(found[row], logits[row])
            continue
        share = reference_filter(logits[row].tolist(), t, k, p, m)
        kept = (found[row] > -torch.inf).nonzero().flatten().tolist()
        assert kept == list(share)
        torch.testing.assert_close(found[row, kept], logits[row, kept] / t)
        torch.testing.assert_close(found[row].softmax(0)[kept], torch.tensor([*share.values()]))
    last = logits.masked_fill(logits == -torch.inf, torch.inf).argmin(1)
    found = filter_logits(logits, *tensors(rows), last)
    torch.testing.assert_close(
        found.gather(1, last[:, None]),
        (logits / torch.tensor([row[0] or 1.0 for row in rows])[:, None]).gather(1, last[:, None]),
    )
    logits[:, 3] = torch.nan
    assert filter_logits(logits, *tensors(rows), sampled)[:, 3].isnan().all()


def test_rows_do_not_depend_on_each_other(backend):
    """Rows do not depend on each other, also if a neighbour makes the batch sort."""
    torch.manual_seed(0)
    logits = torch.randn(len(PARAMETERS), 300)
    u = torch.rand(len(PARAMETERS), dtype=torch.float64)
    together = tokens_of(backend, logits, *tensors(PARAMETERS), u)
    for i, row in enumerate(PARAMETERS):
        alone = tokens_of(
            backend,
            logits[i : i + 1],
            *tensors([row]),
            u[i : i + 1],
            any_top_k_or_p=row[1] > 0 or row[2] < 1,
        )
        assert alone.item() == together[i].item()


def test_ties_go_to_the_lower_token(backend):
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]]).repeat(200, 1)
    u = torch.linspace(0, 0.999, 200, dtype=torch.float64)
    for row, allowed in [((1.0, 2, 1.0, 0.0), {1, 2}), ((1.0, 0, 0.3, 0.0), {1, 2})]:
        got = tokens_of(backend, logits, *tensors([row] * 200), u)
        assert set(got.tolist()) == allowed
    assert backend.greedy_sample(logits)[0][0] == 1


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
def test_forbidden_tokens_are_never_drawn(backend, u):
    logits = torch.full((1, 9), -torch.inf)
    logits[0, 4] = -3.0
    got = tokens_of(
        backend, logits, *tensors([(1.0, 0, 1.0, 0.0)]), torch.tensor([u], dtype=torch.float64)
    )
    assert got.item() == 4


@pytest.mark.parametrize("temperature", [1e-30, 1e-5, 1e30])
def test_extreme_temperatures(backend, temperature):
    logits = torch.tensor([[1e4, -1e4, 2e4, 0.0]])
    got = tokens_of(
        backend,
        logits,
        *tensors([(temperature, 0, 1.0, 0.0)]),
        torch.tensor([0.6], dtype=torch.float64),
    )
    assert got.item() == 2


def test_distribution(backend):
    """A chi-square test of sampled tokens against the softmax: 8 tokens are 7 degrees of freedom,
    for which 24.3 is exceeded once in a thousand."""
    logits = torch.tensor([0.3, 1.0, -1.0, 0.0, 2.0, 0.5, -0.5, 1.5])
    count = 20_000
    seeds = torch.arange(count)
    u = backend.uniform_noise(seeds, torch.full_like(seeds, 17))
    got = tokens_of(backend, logits.repeat(count, 1), *tensors([(0.8, 0, 1.0, 0.0)] * count), u)
    expected = torch.softmax(logits / 0.8, 0) * count
    observed = torch.bincount(got, minlength=8)
    assert ((observed - expected) ** 2 / expected).sum() < 24.3


def test_logits_are_not_changed(backend):
    logits = torch.randn(3, 20)
    before = logits.clone()
    tokens_of(backend, logits, *tensors(PARAMETERS[7:10]), torch.rand(3, dtype=torch.float64))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab", [5, 8, 255, 256, 257, 5000])
def test_backends_agree(backend, vocab):
    """Backends sample the same tokens as the reference, also from large vocabularies and their
    tails."""
    torch.manual_seed(vocab)
    rows = PARAMETERS * 20 + [(1.0, 0, 0.9999, 0.0), (0.3, vocab - 1, 0.95, 0.0)] * 10
    logits = torch.randn(len(rows), vocab) * 3
    logits[torch.rand(logits.shape) < 0.05] = -torch.inf
    logits[:, 2] = 1.0
    u = torch.rand(len(rows), dtype=torch.float64)
    wanted = tokens_of(reference, logits, *tensors(rows), u)
    assert torch.equal(tokens_of(backend, logits, *tensors(rows), u), wanted)
    assert torch.equal(backend.greedy_sample(logits)[0], logits.argmax(-1))


def test_the_last_token_can_be_drawn_and_nothing_beyond_it(backend):
    logits = torch.zeros(2, 300)
    logits[1, 299] = -torch.inf
    u = torch.full((2,), 1 - 2**-53, dtype=torch.float64)
    got = tokens_of(backend, logits, *tensors([(1.0, 0, 1.0, 0.0)] * 2), u)
    assert got.tolist() == [299, 298]


def test_nan_logits_still_yield_a_token(backend):
    logits = torch.full((2, 20), float("nan"))
    logits[1] = -torch.inf
    for row in PARAMETERS:
        u = torch.full((2,), 0.5, dtype=torch.float64)
        got = tokens_of(backend, logits, *tensors([row] * 2), u)
        assert ((got >= 0) & (got < 20)).all()


VALUES = [-math.inf, -1e30, -3.0, 0.0, 1.0, math.nextafter(1.0, 2.0), 4.0]


@pytest.mark.parametrize("row", [(0.01, 2, 1.0, 0.0), (0.01, 0, 1.0, 0.0)])
@pytest.mark.parametrize("underflow", [-88.0, -95.0, -103.0])
def test_a_weight_that_underflows_is_never_sampled(backend, row, underflow):
    """A weight that underflows is never sampled. The first token has the smallest weight: at u = 0,
    any weight above 0 would be sampled."""
    logits = torch.tensor([[underflow * 0.01, -torch.inf, 0.0]])
    u = torch.zeros(1, dtype=torch.float64)
    assert tokens_of(backend, logits, *tensors([row]), u).tolist() == [2]
    logits[0, 0] = -86.0 * 0.01
    assert tokens_of(backend, logits, *tensors([(*row[:2], 1.0, 0.0)]), u).tolist() == [0]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(5, "peaked", 2, 1.0, 0.0, 0.01, 1)  # the second most likely token underflows
@given(
    st.integers(1, 700),
    st.sampled_from(["few values", "flat", "peaked", "one"]),
    st.sampled_from([1, 2, 3, 50, 699, 10_000, 0]),
    st.sampled_from([1e-6, 0.3, 0.7, 0.97, 1.0]),
    st.sampled_from([0.0, 0.01, 1.0]),
    st.sampled_from([0.01, 1.0, 50.0]),
    st.integers(0, 10_000),
)
def test_the_filters_keep_the_defined_tokens(
    backend, vocab, shape, top_k, top_p, min_p, temperature, seed
):
    """Over many values of u, the sampled tokens are those of the definition, also with ties. If the
    edge of top_p lies within rounding of a sum, the test expects nothing."""
    torch.manual_seed(seed)
    logits = {
        "few values": torch.tensor(VALUES)[torch.randint(len(VALUES), (vocab,))],
        "flat": torch.randn(vocab) * 0.1,
        "peaked": torch.randn(vocab) * 6,
        "one": torch.full((vocab,), -math.inf),
    }[shape].float()
    logits[seed % vocab] = 4.0
    scaled = (logits - logits.max()) / temperature
    weight = torch.where(scaled >= max(math.log(min_p or 1e-38), -87), scaled.double().exp(), 0)
    order = logits.argsort(descending=True, stable=True)[: top_k or vocab]
    held = weight[order].cumsum(0)
    edge = (held / held[-1] - torch.tensor(top_p).double()).abs().min()
    if top_p < 1 and edge < 1e-5:
        return
    last = int((held < top_p * held[-1]).sum()) if top_p < 1 else vocab
    possible = {t for t in order[: last + 1].tolist() if weight[t] > 0}
    noises = torch.linspace(0, 1 - 2**-53, 64, dtype=torch.float64)
    rows = [(temperature, top_k, top_p, min_p)] * len(noises)
    got = tokens_of(backend, logits.repeat(len(noises), 1), *tensors(rows), noises)
    assert set(got.tolist()) <= possible
    if len(possible) < 5 and min(weight[t] for t in possible) > 0.1:
        assert set(got.tolist()) == possible
