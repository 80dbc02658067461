"""The whole GPU path on one card, without Ray: greedy answers against transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers

from swell.engine.scheduling.scheduler import NANS_IN_LOGITS
from swell.engine.wire import EngineCoreRequest, FinishReason
from swell.worker.sampler_wire import Grammar, SamplerParams
from tests.engine.outputs.test_nan_logits import BAD, NAN, spoil
from tests.engine.outputs.test_token_exact import NEW_TOKENS, PROMPTS, Engine, tokens
from tests.gpu.memory import allocated
from tests.worker import tiny_models
from tests.worker.models.test_models import GENERIC, NATIVE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def truth(folder: Path) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model.eval().cuda()
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(ids, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


OF_TRANSFORMERS = (
    *("apertus", "cohere", "exaone4", "gemma3", "gemma3n", "gemma4", "gpt2", "granite", "opt"),
    *("phimoe", "stablelm"),
)
"""Families that run through transformers, besides those of `GENERIC`."""


@pytest.mark.parametrize("family", [*NATIVE, *GENERIC, *OF_TRANSFORMERS])
def test_greedy_answers_equal_the_reference(family, tmp_path):
    tiny_models.make(tmp_path, family)
    wanted = truth(tmp_path)
    for depth in (1, 3):
        settings = {"model__device": "cuda", "scheduler__steps_in_flight": depth}
        with Engine(tmp_path, **settings) as engine:
            assert engine.greedy() == wanted
            assert max(engine.depths) == depth


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_by_the_same_model_are_accepted(depth, tmp_path):
    tiny_models.make(tmp_path, "llama-llama3")
    drafts = {"drafts__method": "model", "drafts__model": {"path": str(tmp_path)}}
    with Engine(
        tmp_path, model__device="cuda", scheduler__steps_in_flight=depth, **drafts
    ) as engine:
        assert engine.greedy() == truth(tmp_path)
        drafter = engine.core.scheduler.drafter
        assert 0 < drafter.num_accepted == drafter.num_drafts


@pytest.mark.parametrize("method", ["none", "model"])
def test_memory_is_freed(tmp_path, method):
    tiny_models.make(tmp_path, "llama")
    before = allocated()
    small = {"path": str(tmp_path)} if method == "model" else None
    with Engine(
        tmp_path, model__device="cuda", drafts__method=method, drafts__model=small
    ) as engine:
        engine.greedy()
        assert allocated() > before
    assert allocated() == before


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("params", [SamplerParams(), SamplerParams(temperature=1.0, logprobs=1)])
def test_nan_logits_fail_only_their_request(family, params, tmp_path):
    """NaN logits terminate only their own request. NaN is detected on the device, without a host
    sync before the tokens are read."""
    tiny_models.make(tmp_path, family)
    spoil(tmp_path, BAD, NAN)
    with Engine(tmp_path, model__device="cuda", scheduler__steps_in_flight=2) as engine:
        good = [EngineCoreRequest(str(i), p, params, 8) for i, p in enumerate(PROMPTS)]
        alone = engine.answer(good)
        got = engine.answer([*good[:3], EngineCoreRequest("bad", [5, BAD], params, 8), *good[3:]])
        (last,) = got.pop("bad")
        assert (last.finish_reason, last.stop_reason) == (FinishReason.ERROR, NANS_IN_LOGITS)
        assert {n: tokens(o) for n, o in got.items()} == {n: tokens(o) for n, o in alone.items()}


def test_a_grammar_without_its_library_is_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    tiny_models.make(tmp_path, "llama")
    with Engine(tmp_path, model__device="cuda") as engine:
        params = SamplerParams(grammar=Grammar("start: /a/"))
        got = engine.answer([EngineCoreRequest("g", [5], params, 4)])
        assert "llguidance" in str(got["g"][-1].stop_reason)
