"""The whole GPU path on one card, without Ray: greedy answers against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.engine.test_token_exact import NEW_TOKENS, PROMPTS, Engine
from tests.worker import tiny_models

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


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("family", ["llama-llama3", "mistral", "qwen2", "qwen3", "gpt_neox"])
def test_greedy_answers(family, depth, tmp_path):
    tiny_models.make(tmp_path, family)
    settings = {"model__device": "cuda", "scheduler__steps_in_flight": depth}
    with Engine(tmp_path, **settings) as engine:
        assert engine.greedy() == truth(tmp_path)


def test_memory_is_given_back(tmp_path):
    tiny_models.make(tmp_path, "llama")
    before = torch.cuda.memory_allocated()
    with Engine(tmp_path, model__device="cuda") as engine:
        engine.greedy()
        assert torch.cuda.memory_allocated() > before
    assert torch.cuda.memory_allocated() == before
