"""CUDA graphs: captured steps compute the same bits as eager ones."""

from __future__ import annotations

import pytest
import torch

from swell.engine.wire import EngineCoreRequest
from swell.kernels.graph import NotCapturableError, can_capture, capture
from swell.worker.sampler_wire import SamplerParams
from tests.engine.outputs.test_token_exact import PROMPTS, Engine, tokens
from tests.worker import tiny_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_captured_answers_equal_eager_ones(kind, depth, dtype, tmp_path):
    """Rows that need logits, and rows that need only tokens; prompts longer than a step."""
    tiny_models.make(tmp_path, kind)
    drawn = SamplerParams(temperature=0.8, top_p=0.9, seed=5, logprobs=2)
    answers = []
    for eager in (False, True):
        settings = {
            "model__device": "cuda",
            "model__dtype": dtype,
            "model__enforce_eager": eager,
            "scheduler__steps_in_flight": depth,
            "scheduler__max_tokens_per_step": 16,
        }
        with Engine(tmp_path, **settings) as engine:
            requests = [
                EngineCoreRequest(str(i), prompt, drawn if i % 2 else SamplerParams(), 20)
                for i, prompt in enumerate(PROMPTS)
            ]
            greedy = engine.greedy()
            outputs = engine.answer(requests)
            extras = [output.extras for each in outputs.values() for output in each]
            found = {name: tokens(each) for name, each in outputs.items()}
            answers.append((greedy, found, extras))
    assert answers[0] == answers[1]


def test_a_replay_computes_the_current_inputs_and_refuses_host_reads():
    assert can_capture("cuda")
    x = torch.ones(4, device="cuda")
    (doubled,), graph = capture(lambda: [x * 2], "cuda", 4)
    for value in (3.0, 5.0):
        x.fill_(value)
        graph.replay(4)
        assert doubled.tolist() == [2 * value] * 4
    assert graph.progress == 2
    with pytest.raises(NotCapturableError):
        capture(lambda: [x * x.sum().item()], "cuda", 4)
    (tripled,), other = capture(lambda: [x * 3], "cuda", 4)  # nothing of the failure remains
    other.replay(4)
    assert tripled.tolist() == [15.0] * 4


def test_graphs_are_captured_again_after_all_were_dropped():
    """The memory pool of the first ones is gone."""
    x = torch.ones(4, device="cuda")
    for factor in (2, 3):
        captured = [capture(lambda by=factor: [x * by], "cuda", 4) for _ in range(2)]
        for (result,), graph in captured:
            graph.replay(4)
            assert result.tolist() == [float(factor)] * 4
        del captured, result, graph
