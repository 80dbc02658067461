"""On CPUs the bits of an answer of a model that transformers computes do not depend on the requests
that are computed with it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from swell.engine.wire import EngineCoreOutput, EngineCoreRequest
from swell.worker.sampler_wire import PromptLogprobs, SamplerParams, TokenLogprobs
from tests.engine.outputs.test_token_exact import Engine, tokens
from tests.support.device import DEVICE
from tests.worker import tiny_models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DEVICE != "cpu", reason="on GPUs this needs model.exact"),
]

FAMILIES = [
    *("apertus", "cohere", "exaone4", "gemma2", "gemma3", "gemma4", "gpt2", "gpt_neox"),
    *("granite", "llama", "olmo2", "opt", "phi3", "stablelm", "starcoder2"),
    *("mixtral", "qwen3_moe", "qwen3_moe-mixed"),
]
"""Families whose steps are captured."""
_rng = random.Random(7)
PROMPTS = [[_rng.randrange(3, 300) for _ in range(length)] for length in (1, 3, 40, 17, 8)]


def request(number: int) -> EngineCoreRequest:
    params = SamplerParams(logprobs=3, prompt_logprobs=1, seed=number)
    return EngineCoreRequest(str(number), PROMPTS[number], params, 6, skip_prefix_cache=True)


def answer(outputs: list[EngineCoreOutput]) -> list[object]:
    """Returns the tokens, and all log probabilities with their tokens."""
    logprobs = [
        (list(entry.token_ids), list(entry.logprobs))
        for output in outputs
        for entry in output.extras
        if isinstance(entry, TokenLogprobs | PromptLogprobs)
    ]
    assert logprobs
    return [tokens(outputs), logprobs]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_of_a_request_do_not_depend_on_its_batch(tmp_path: Path, family: str) -> None:
    tiny_models.make(tmp_path, family)
    with Engine(tmp_path, model__backend="transformers") as engine:
        numbers = range(len(PROMPTS))
        alone = [answer(engine.answer([request(one)])[str(one)]) for one in numbers]
        together = engine.answer([request(one) for one in numbers])
        assert [answer(together[str(one)]) for one in numbers] == alone
