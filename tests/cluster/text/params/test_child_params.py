"""The sampling parameters of each answer to a prompt."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swell.cluster.text.params.sampling_params import (
    SEED_BITS,
    SamplingParams,
    child_sampling_params,
    to_core_request,
)

seeds = st.none() | st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 5),
    more=st.none() | st.integers(0, 4),
    seed=seeds,
    logprobs=st.none() | st.integers(0, 3),
)
def test_children_differ_in_their_seeds_alone(n, more, seed, logprobs) -> None:
    params = SamplingParams(
        n=n, best_of=None if more is None else n + more, seed=seed, logprobs=logprobs, stop=["x"]
    )
    found = child_sampling_params(params)
    if n == 1 and more is None:  # one answer needs no distinct seed
        assert found == [params]
        return
    assert len(found) == n + (more or 0)
    expected_logprobs = 0 if more and logprobs is None else logprobs
    for index, child in enumerate(found):
        own = None if seed is None else (seed + index) % 2**SEED_BITS
        assert child == SamplingParams(seed=own, logprobs=expected_logprobs, stop=["x"])


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(-(2**63), 2**63 - 1))
def test_the_first_child_draws_what_one_answer_alone_would(seed) -> None:
    def sampling_seed(params: SamplingParams) -> int:
        core = to_core_request(
            params, external_req_id="r", prompt_token_ids=[1], max_tokens=1, eos_token_ids=[]
        )
        return core.sampler.seed

    params = SamplingParams(seed=seed, n=3)
    first, *others = map(sampling_seed, child_sampling_params(params))
    assert first == sampling_seed(params)
    assert others == [(first + i) % 2**63 for i in (1, 2)]


def test_children_without_a_seed_draw_apart() -> None:
    cores = [
        to_core_request(
            p, external_req_id="r", prompt_token_ids=[1], max_tokens=1, eos_token_ids=[]
        )
        for p in child_sampling_params(SamplingParams(n=8))
    ]
    assert len({core.sampler.seed for core in cores}) == 8
    assert {core.external_req_id for core in cores} == {"r"}
    assert len({core.request_id for core in cores}) == 8
