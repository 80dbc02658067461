"""Steps of few tokens are replayed, and nobody can tell by the answers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from swell.cluster.local import LLM, SamplingParams
from swell.kernels.graph import can_capture
from swell.worker import graphs
from tests.worker import tiny_models

pytestmark = pytest.mark.skipif(not can_capture("cpu"), reason="the compiled column is missing")


NANO = Path(__file__).parents[2] / "configs" / "models" / "nano"


def make(folder, family) -> None:
    tiny_models.make(folder, family)
    for file in NANO.glob("tokenizer*"):
        shutil.copy(file, folder)


def answers(folder, **overrides) -> tuple[list, set[int]]:
    """Ids and log probabilities of prompts that come and go, and the captured numbers of tokens."""
    options = {"scheduler.max_rows": 4, "cache.memory_bytes": 1 << 22, **overrides}
    with LLM(str(folder), **options) as llm:
        prompts = [[5, 6, 7], [8, 9], list(range(10, 40)), [11, 12, 13, 14]]
        wishes = [
            SamplingParams(
                temperature=0.8, seed=i, max_tokens=6 + 9 * i, ignore_eos=True, logprobs=2
            )
            for i in range(4)
        ]
        outputs = [llm.generate(prompts, wishes)]
        ticks = llm._core.executor.ticks
        outputs.append(llm.generate(prompts[:1], wishes[3]))
        assert llm._core.executor.ticks >= ticks + wishes[3].max_tokens  # seen to make progress
        forward = llm._core.executor._worker.runner._model_step
        captured = set(getattr(forward, "_captured", ()))
    parts = [output.outputs[0] for some in outputs for output in some]
    return [(part.token_ids, part.logprobs) for part in parts], captured


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_answers_are_the_same_bit_for_bit(tmp_path, monkeypatch, family, dtype):
    make(tmp_path, family)
    replayed, captured = answers(tmp_path, **{"model.dtype": dtype})
    assert captured == {1, 2, 3, 4}
    monkeypatch.setattr(graphs, "MAX_TOKENS", 0)
    plain, captured = answers(tmp_path, **{"model.dtype": dtype})
    assert not captured
    assert replayed == plain


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_neox"])
def test_models_that_compute_otherwise_run_as_ever(tmp_path, monkeypatch, family):
    """Experts are chosen on the way; a model of transformers' calls torch."""
    make(tmp_path, family)
    tried, captured = answers(tmp_path)
    assert not captured
    monkeypatch.setattr(graphs, "MAX_TOKENS", 0)
    assert tried == answers(tmp_path)[0]
