"""The bits of an answer depend neither on its neighbours nor on which of its steps are replayed."""

from __future__ import annotations

import shutil

import pytest

from swell.cluster.local import LLM, SamplingParams
from swell.worker.step import captured_forward
from tests.kernels.load import load_backend
from tests.support.paths import NANO
from tests.worker import tiny_models

pytestmark = pytest.mark.slow

SEEDED = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True, logprobs=2)
PROMPT_LOGPROBS = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
PROMPT = list(range(10, 40))
LONG = [3 + i % 300 for i in range(240)]


@pytest.fixture
def folder(tmp_path, family):
    load_backend("cpu", "graph")
    tiny_models.make(tmp_path, family)
    for file in NANO.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    return tmp_path


@pytest.fixture
def replays(monkeypatch) -> list[int]:
    """The numbers of samples of the steps that were replayed."""
    from swell.kernels.cpu.capture.recording import Recording

    seen: list[int] = []
    replay = Recording.replay

    def watched(self, *sizes: int) -> None:
        seen.append(sizes[2])
        replay(self, *sizes)

    monkeypatch.setattr(Recording, "replay", watched)
    return seen


def start(folder, dtype: str, tokens: int = 16, **options) -> LLM:
    """`tokens`: the most tokens of a step."""
    return LLM(
        str(folder),
        **{
            "model.backend": "transformers",
            "model.dtype": dtype,
            "scheduler.max_rows": 4,
            "scheduler.max_tokens_per_step": tokens,
            "cache.memory_bytes": 1 << 22,
            "cache.prefix_caching": False,
            **options,
        },
    )


def answer(llm: LLM, *neighbours: tuple[list[int], SamplingParams]):
    """Returns the tokens and log probabilities of the answer to `PROMPT`, with neighbours."""
    prompts, params = zip((PROMPT, SEEDED), *neighbours, strict=True)
    part = llm.generate(list(prompts), list(params))[0].outputs[0]
    return part.token_ids, part.logprobs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["gpt_neox", "gemma2", "phi3", "stablelm", "cohere", "granite"])
def test_steps_that_are_not_replayed_round_like_those_that_are(
    folder, dtype, monkeypatch, replays
) -> None:
    with start(folder, dtype) as llm:
        mixed = answer(llm, (LONG, PROMPT_LOGPROBS))
        assert len(replays) < 6, "most steps have prompt log probabilities"
        alone = answer(llm)
        assert len(replays) >= SEEDED.max_tokens
    assert mixed == alone
    with start(folder, dtype, tokens=10) as llm:
        assert answer(llm) == alone, "chunks of the prompt"
    monkeypatch.setattr(captured_forward, "MAX_SAMPLES", 2)
    replays.clear()
    with start(folder, dtype) as llm:
        assert answer(llm, *[(PROMPT[i:], SEEDED) for i in (5, 9, 20)]) == alone
    assert max(replays) == 2


@pytest.mark.parametrize("family", ["gpt_neox"])
def test_wrong_captures_round_no_step(folder, monkeypatch, replays) -> None:
    """The first step is compared, even if it cannot be replayed as a whole."""
    from swell.kernels.cpu.capture import torch_operations

    request = (LONG, PROMPT_LOGPROBS)
    with start(folder, "float32", **{"model.enforce_eager": True}) as llm:
        expected = answer(llm, request)
    monkeypatch.setitem(torch_operations.POINTWISE, "gelu", lambda a, **_: ("relu", a))
    with start(folder, "float32", 300) as llm:
        assert answer(llm, request) == expected
    assert not replays
