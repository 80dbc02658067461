"""NaN logits terminate the requests that have them and change no other output.

One row of the embedding is NaN, so a request fails if and only if it contains that token. All other
outputs must stay bitwise equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from swell.engine.scheduling.scheduler import NANS_IN_LOGITS
from swell.engine.wire import EngineCoreOutput, EngineCoreRequest, FinishReason
from swell.kernels import backends as backends
from swell.worker.sampler_wire import SamplerParams, TokenLogprobs
from tests.engine.outputs.test_token_exact import Engine
from tests.worker import tiny_models

pytestmark = pytest.mark.slow

BAD = 77
"""The token whose embedding is NaN."""
GOOD = {"a": [5, 6, 7], "b": list(range(10, 50)), "c": [200, 201]}
HIT = {"x": [5, BAD], "y": [*range(100, 130), BAD, 9], "z": [BAD]}
SAMPLERS = {
    "greedy": SamplerParams(),
    "drawn": SamplerParams(temperature=1.0, seed=3),
    "filtered": SamplerParams(temperature=2.0, seed=3, top_k=40, top_p=0.9, min_p=0.01),
    "penalties": SamplerParams(repetition_penalty=1.3, frequency_penalty=0.5),
    "allowed": SamplerParams(allowed_token_ids=[3, 4, 5]),
    "logprobs": SamplerParams(logprobs=2),
    "prompt logprobs": SamplerParams(prompt_logprobs=1),
}
NAN, INF = float("nan"), float("inf")


def spoil(folder: Path, token: int, value: float) -> None:
    """Sets the embedding of a token to `value`."""
    file = folder / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    name = next(n for n in weights if "embed_tokens" in n or "embed_in" in n)
    weights[name][token] = torch.full_like(weights[name][token], value)
    safetensors.torch.save_file(weights, file, {"format": "pt"})


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[tuple[str, float], Path]:
    made = {}
    for family in ("llama", "llama-tied", "gpt_neox"):
        for value in (NAN, INF):
            path = tmp_path_factory.mktemp(family)
            tiny_models.make(path, family)
            spoil(path, BAD, value)
            made[family, value] = path
    return made


@pytest.fixture(params=["cpu", "reference"])
def backend(request, monkeypatch) -> Iterator[str]:
    if request.param == "reference":
        monkeypatch.setitem(backends.BACKENDS, "cpu", ("reference",))
    backends.get.cache_clear()
    yield request.param
    backends.get.cache_clear()


def requests(prompts: dict[str, list[int]], sampler: SamplerParams) -> list[EngineCoreRequest]:
    skips = sampler.prompt_logprobs is not None
    return [
        EngineCoreRequest(name, prompt, sampler, 8, skip_prefix_cache=skips)
        for name, prompt in prompts.items()
    ]


def check(
    engine: Engine, alone: dict[str, list[EngineCoreOutput]], sampler: SamplerParams, exact: bool
) -> None:
    """Runs all requests in one batch, including the failing ones. `exact`: the products of a row
    have the same bits in every batch."""
    mixed = {"x": HIT["x"], **GOOD, "y": HIT["y"], "z": HIT["z"]}
    before = engine.core.scheduler.num_nans_in_logits
    got = engine.answer(requests(mixed, sampler))
    for name in GOOD:
        mine, true = summary(got[name]), summary(alone[name])
        assert mine[:2] == true[:2]
        assert mine[2] == (true[2] if exact else pytest.approx(true[2], abs=1e-4))
    for name in HIT:
        # for a chunked prompt, the first chunks may have been reported
        *before_it, last = got[name]
        assert not any(output.new_token_ids for output in got[name])
        assert not before_it or sampler.prompt_logprobs is not None
        assert (last.finish_reason, last.stop_reason) == (FinishReason.ERROR, NANS_IN_LOGITS)
    assert engine.core.scheduler.num_nans_in_logits - before == len(HIT)
    engine.core.check_idle()


def summary(outputs: list[EngineCoreOutput]) -> tuple[list[int], object, list[float]]:
    """Returns tokens, finish reason and all log probabilities."""
    tokens = [token for output in outputs for token in output.new_token_ids]
    logprobs: list[float] = []
    for extra in (extra for output in outputs for extra in output.extras):
        if isinstance(extra, TokenLogprobs):
            logprobs += extra.logprobs
        else:
            logprobs += [logprob for of_one in extra.logprobs for logprob in of_one]
    return tokens, outputs[-1].finish_reason, logprobs


@pytest.mark.parametrize(
    ("family", "value"), [("llama", NAN), ("llama", INF), ("llama-tied", NAN), ("gpt_neox", NAN)]
)
def test_only_requests_with_nan_logits_fail(folders, backend, family, value):
    """Only requests with NaN logits are terminated. A tied head has the NaN row too, so that the
    logits of every row contain a NaN."""
    with Engine(folders[family, value], model__cpu_threads=1) as engine:
        for name, sampler in SAMPLERS.items():
            if family == "llama-tied":
                got = engine.answer(requests(GOOD, sampler))
                if name != "allowed":  # the logits to sample from contain none
                    assert {o.stop_reason for (o,) in got.values()} == {NANS_IN_LOGITS}
                continue
            alone = engine.answer(requests(GOOD, sampler))
            assert all(
                outputs[-1].finish_reason is FinishReason.LENGTH for outputs in alone.values()
            )
            check(engine, alone, sampler, exact=backend == "cpu" and family == "llama")


@pytest.mark.slow
@pytest.mark.parametrize(
    "split", [{"parallel__tensor": 2}, {"parallel__pipeline": 2}], ids=["tensor", "pipeline"]
)
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_nan_logits_in_groups_with_steps_in_flight(folders, family, split):
    overrides = {"model__cpu_threads": 1, "scheduler__steps_in_flight": 3, **split}
    with Engine(folders[family, NAN], scheduler__max_tokens_per_step=16, **overrides) as engine:
        for sampler in SAMPLERS.values():
            check(engine, engine.answer(requests(GOOD, sampler)), sampler, exact=False)
        assert max(engine.depths) == 3


def test_nan_values_do_not_stay_in_a_cache(folders):
    """NaN values stay in no cache: the blocks are not found as a prefix and harm no later request
    that gets them."""
    with Engine(folders["llama", NAN], model__cpu_threads=1) as engine:
        alone = engine.answer(requests(GOOD, SamplerParams()))
        many = {f"n{i}": [BAD, *range(3 + i, 120)] for i in range(40)}
        for outputs in engine.answer(requests(many, SamplerParams())).values():
            assert outputs[-1].finish_reason is FinishReason.ERROR
        names = engine.core.scheduler.kv.pool._cached
        assert len(names) == 2, "the two full blocks of the good ones"
        engine.core.scheduler.kv.reset_prefix_cache()
        again = engine.answer(requests(GOOD, SamplerParams()))
        assert {n: summary(o) for n, o in again.items()} == {
            n: summary(o) for n, o in alone.items()
        }


@pytest.mark.parametrize(
    "overrides",
    [
        {"scheduler__steps_in_flight": 2},
        {"parallel__tensor": 2, "scheduler__steps_per_plan": 3},
        {"drafts__method": "ngram", "drafts__min_match": 1},
    ],
    ids=["two steps", "three steps per plan, tensor 2", "drafts"],
)
def test_nan_logits_are_counted(folders, overrides):
    """An embedding of NaN makes all logits of its requests NaN. Others have none, and the same
    answers as without the count."""
    with Engine(folders["llama", NAN], **overrides) as engine:
        alone = engine.answer(requests(GOOD, SamplerParams()))
    with Engine(folders["llama", NAN], model__compute_nans_in_logits=True, **overrides) as engine:
        got = engine.answer(requests({**GOOD, **HIT}, SamplerParams()))
    for name in GOOD:
        assert summary(got[name]) == summary(alone[name])
        assert not any(output.num_nans_in_logits for output in got[name])
    for name in HIT:
        last = got[name][-1]
        assert (last.stop_reason, last.num_nans_in_logits) == (NANS_IN_LOGITS, tiny_models.VOCAB)


def test_nan_logits_that_a_mask_hides_are_counted(folders):
    """The head of a tied model has one row of NaN, which `allowed_token_ids` excludes."""
    sampler = SamplerParams(allowed_token_ids=[3, 4, 5])
    with Engine(folders["llama-tied", NAN], model__compute_nans_in_logits=True) as engine:
        for outputs in engine.answer(requests(GOOD, sampler)).values():
            assert [output.num_nans_in_logits for output in outputs] == [1]
            assert outputs[0].finish_reason is FinishReason.ERROR
