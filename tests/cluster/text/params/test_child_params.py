"""The sampling parameters of each answer to a prompt."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.text.params.sampling_params import SEED_BITS, SamplingParams, sampler_params

seeds = st.none() | st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 5),
    more=st.none() | st.integers(0, 4),
    seed=seeds,
    logprobs=st.none() | st.integers(0, 3),
)
def test_children_differ_only_in_their_seeds(n, more, seed, logprobs) -> None:
    params = SamplingParams(
        n=n, best_of=None if more is None else n + more, seed=seed, logprobs=logprobs, stop=["x"]
    )
    assert params.num_children == n + (more or 0)
    expected_logprobs = 0 if more and logprobs is None else logprobs
    for index in range(params.num_children):
        child = sampler_params(params, index)
        own = child.seed if seed is None else (seed + index) % 2**SEED_BITS
        alone = SamplingParams(seed=own, logprobs=expected_logprobs)
        assert child == sampler_params(alone)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(-(2**63), 2**63 - 1))
def test_the_first_child_draws_the_same_tokens_as_a_single_answer(seed) -> None:
    params = SamplingParams(seed=seed, n=3)
    first, *others = [sampler_params(params, index).seed for index in range(3)]
    assert first == sampler_params(SamplingParams(seed=seed)).seed
    assert others == [(first + i) % 2**63 for i in (1, 2)]


def test_children_without_a_seed_draw_independently() -> None:
    params = SamplingParams(n=8)
    assert len({sampler_params(params, index).seed for index in range(8)}) == 8
