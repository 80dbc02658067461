"""Steps on a card do not wait for the device, and a sleeping engine holds no memory."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from swell.cluster.local import LLM
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.engine.wire import EngineCoreRequest
from swell.worker.runner import ModelRunner
from swell.worker.sampler_wire import PoolingParams, SamplerParams
from tests.cluster.test_local_weights import make
from tests.engine.outputs.test_token_exact import PROMPTS, Engine
from tests.gpu.memory import allocated
from tests.support.weights.pooled_models import make as make_pooled
from tests.worker import tiny_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


class Waits:
    """Records where steps wait for the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: set[str] = set()
        self.num_steps = 0
        self._execute = ModelRunner.execute_model
        monkeypatch.setattr(
            ModelRunner, "execute_model", lambda runner, plan: self._execute_model(runner, plan)
        )

    def _execute_model(self, runner: ModelRunner, plan: Any) -> Any:
        self.num_steps += 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return self._execute(runner, plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")
                self.found |= {
                    f"{warning.filename}:{warning.lineno}"
                    for warning in caught
                    if "called a synchronizing CUDA operation" in str(warning.message)
                }

    def forget(self) -> None:
        """Forgets the first steps, which allocate."""
        self.found.clear()
        self.num_steps = 0


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Waits:
    return Waits(monkeypatch)


SAMPLERS = {
    "greedy": SamplerParams(),
    "drawn": SamplerParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=4),
    "penalties": SamplerParams(
        temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.5
    ),
    "bans": SamplerParams(logit_bias={5: 2.0}, bad_words=[[7], [8, 9]]),
    "allowed": SamplerParams(allowed_token_ids=[5, 6, 7, 8]),
    "logprobs": SamplerParams(logprobs=3, prompt_logprobs=2),
}


@pytest.mark.parametrize("offload", [0, 4_000_000])
@pytest.mark.parametrize("drafts", ["none", "ngram"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_neox", "qwen3_moe"])
def test_a_step_does_not_synchronize(
    family: str, drafts: str, offload: int, tmp_path: Path, waits: Waits
) -> None:
    tiny_models.make(tmp_path, family)
    settings = {"drafts__method": drafts, "cache__offload_bytes": offload}
    if offload:
        settings |= {"cache__block_tokens": 4, "cache__memory_bytes": 8192 * 60}
    requests = [
        EngineCoreRequest(f"{name} {i}", prompt, params, 20)
        for name, params in SAMPLERS.items()
        for i, prompt in enumerate(PROMPTS)
    ]
    settings = {"scheduler__steps_in_flight": 2, **settings}
    with Engine(tmp_path, model__device="cuda", **settings) as engine:
        first = engine.answer(requests)
        waits.forget()
        second = engine.answer(requests)
    assert waits.num_steps > 20 and not waits.found
    assert not any(answers[-1].stop_reason for answers in [*first.values(), *second.values()])


@pytest.mark.parametrize("family", ["bert", "qwen3"])
def test_a_pooling_step_does_not_synchronize(family: str, tmp_path: Path, waits: Waits) -> None:
    make_pooled(tmp_path, family, modes={"pooling_mode_mean_tokens": True})
    params = SamplerParams(pooling=PoolingParams())
    requests = [EngineCoreRequest(str(i), [5] * 20, params, 0) for i in range(20)]
    with Engine(tmp_path, model__device="cuda") as engine:
        engine.answer(requests)
        waits.forget()
        engine.answer(requests)
    assert waits.num_steps and not waits.found


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_frees_its_memory(level: int, tmp_path: Path) -> None:
    folder = make(tmp_path, 1)
    before = allocated()
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(folder), **{"model.device": "cuda", "cache.memory_bytes": 50_000_000}) as llm:

        def answer() -> list[int]:
            (output,) = llm.generate([PROMPTS[2]], params)
            return list(output.outputs[0].token_ids)

        wanted, held = answer(), allocated() - before
        assert held > 50_000_000
        for _ in range(2):
            llm.sleep(level)
            assert allocated() - before < 0.02 * held
            llm.wake_up()
            assert answer() == wanted
            assert allocated() - before == pytest.approx(held, rel=0.1)
    assert allocated() == before
