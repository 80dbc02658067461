"""The last layer computes only the tokens whose hidden states are read."""

from __future__ import annotations

import shutil

import pytest

from swell.cluster.local import LLM, SamplingParams
from tests.support.paths import NANO
from tests.worker import tiny_models

pytestmark = pytest.mark.slow

PROMPTS = [[5, 6, 7], list(range(10, 40)), [11, 12, 13, 14]]


@pytest.mark.parametrize(("prompt_logprobs", "wanted"), [(None, [0, 3, 3]), (1, [27, 10, 3])])
def test_the_last_layer_computes_only_read_tokens(tmp_path, prompt_logprobs, wanted):
    """The last layer computes only the tokens that are read. A step has 27 tokens; the last 3 of
    the long prompt are computed with the 7 of the others."""
    tiny_models.make(tmp_path, "llama")
    for file in NANO.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    options = {
        "model.enforce_eager": True,
        "scheduler.max_tokens_per_step": 27,
        "cache.memory_bytes": 1 << 22,
        "cache.prefix_caching": False,
    }
    with LLM(str(tmp_path), **options) as llm:
        model = llm._engine.core.executor._worker.model
        seen: list[list[int]] = [[], []]
        for rows, layer in zip(seen, (model.layers[0], model.layers[-1]), strict=True):
            layer.mlp.register_forward_pre_hook(
                lambda _, args, rows=rows: rows.append(len(args[0]))
            )
        params = SamplingParams(
            max_tokens=2, temperature=0, ignore_eos=True, prompt_logprobs=prompt_logprobs
        )
        llm.generate(PROMPTS[1:2] + PROMPTS[::2], params)
    assert seen[0] == [27, 10, 3]
    assert seen[1] == wanted
