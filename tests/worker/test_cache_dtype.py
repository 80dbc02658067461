"""`cache.dtype`: answers are near those of the plain cache, and to the last bit independent of the
steps, the engine and the memory tier in which K and V were written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from swell.cluster.local import LLM, SamplingParams
from swell.configs.config_hash import config_hash, versioned_keys
from swell.configs.schema import ConfigError, load
from swell.kernels.linear import panel
from swell.worker.layers.attention import Attention
from swell.worker.memory import kv_cache
from swell.worker.worker import Worker
from tests.engine import test_handover
from tests.engine.engine_harness import engine as harness
from tests.support.paths import NANO
from tests.worker import tiny_models

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(panel("cpu") is None, reason="no compiler: only a slow backend computes"),
]

TYPES = ["int8", "fp8"]
PROMPTS = [[(7 * i + 31 * k) % 300 + 3 for i in range(n)] for k, n in enumerate((41, 3, 70, 17))]
PROMPTS.append([*PROMPTS[2][:40], 5, 6])  # shares a prefix with another prompt
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("llama")
    tiny_models.make(made, "llama")
    for file in NANO.glob("tokenizer*"):
        shutil.copy(file, made)
    return made


def engine(folder: Path, dtype: str, **settings: Any) -> LLM:
    settings = {"model.device": "cpu", "cache.memory_bytes": 4_000_000, **settings}
    return LLM(str(folder), **{**settings, "cache.dtype": dtype})


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    found = [one.outputs[0] for one in llm.generate(prompts, GREEDY)]
    return [(list(each.token_ids), each.logprobs) for each in found]


@pytest.fixture(scope="module", params=TYPES)
def case(request: pytest.FixtureRequest, folder: Path) -> tuple[str, list[Any]]:
    """A type, and the answers of an engine that computes each prompt at once and keeps no
    prefix."""
    with engine(folder, request.param, **{"cache.prefix_caching": False}) as llm:
        return request.param, answers(llm)


BLOCKS_12 = 12 * 4 * 2 * 2 * 16 * 36
"""The bytes of 12 blocks of 16 tokens, fewer than the prompts need at once: 4 layers, K and V, 2
heads of 32 numbers and a scale."""
SETUPS: dict[str, dict[str, Any]] = {
    "chunks": {"scheduler.max_tokens_per_step": 7, "scheduler.max_rows": 4},
    "preemption": {"cache.memory_bytes": BLOCKS_12, "cache.prefix_caching": False},
    "small blocks": {"cache.block_tokens": 4},
    "n-grams": {"drafts.method": "ngram"},
    "pipeline 2": {"parallel.pipeline": 2},
    "eager": {"model.enforce_eager": True},
    "three steps in flight": {"scheduler.steps_in_flight": 3},
    "offload": {
        "cache.memory_bytes": BLOCKS_12,
        "cache.offload_bytes": BLOCKS_12,
        "cache.offload_disk_bytes": 4 * BLOCKS_12,
    },
}


@pytest.mark.parametrize("setup", SETUPS)
def test_answers_are_equal_in_every_setup(setup: str, folder: Path, case: Any) -> None:
    dtype, expected = case
    with engine(folder, dtype, **SETUPS[setup]) as llm:
        for _ in range(2):  # with prefixes of the first round, and from other tiers
            assert answers(llm) == expected
        if setup == "offload":
            tiers = llm._engine.core.scheduler.kv.offload
            assert tiers.num_saved and tiers.num_loaded
        llm.check_idle()


def test_tensor_parallel_answers_are_equal_among_themselves(folder: Path, case: Any) -> None:
    """Sums over workers are rounded in another order than those of one worker."""
    dtype, expected = case
    split = {"parallel.tensor": 2}
    with engine(folder, dtype, **split, **{"scheduler.max_tokens_per_step": 7}) as llm:
        found = answers(llm)
    with engine(folder, dtype, **split) as llm:
        assert answers(llm) == found
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]


def test_a_draft_model_changes_no_answer(folder: Path, case: Any) -> None:
    dtype, expected = case
    drafts = {"drafts.method": "model", "drafts.model.path": str(folder), "drafts.max_tokens": 3}
    with engine(folder, dtype, **drafts) as llm:
        assert answers(llm) == expected


def test_another_engine_continues_an_answer(folder: Path, case: Any) -> None:
    """K and V of the answer are computed again, as those of a prompt."""
    dtype, expected = case
    begun = [prompt + ids[:9] for prompt, (ids, _) in zip(PROMPTS, expected, strict=True)]
    with engine(folder, dtype) as llm:
        for (ids, logprobs), (whole, whole_logprobs) in zip(
            answers(llm, begun), expected, strict=True
        ):
            assert ids[:15] == whole[9:]
            assert list(logprobs)[:15] == list(whole_logprobs)[9:]


def test_answers_after_sleep(folder: Path, case: Any) -> None:
    dtype, expected = case
    with engine(folder, dtype) as llm:
        assert answers(llm) == expected
        llm.sleep()
        llm.wake_up()
        assert answers(llm) == expected


@pytest.mark.parametrize("dtype", TYPES)
def test_handed_over_blocks_continue_exactly(dtype: str, tmp_path: Path) -> None:
    options = {"cache__dtype": dtype}
    with harness(cache__prefix_caching=False, **options) as llm:
        request = test_handover.request("a", test_handover.PROMPT)
        expected = test_handover.run(llm, request)["a"][0]
    pair = test_handover.Pair(tmp_path, **options)
    pair.hand_over()
    assert pair.resume() == (expected, test_handover.WHOLE)
    pair.close()


BOUNDS = {"int8": 0.0005, "fp8": 0.002}
"""The largest means of the differences of log probabilities, about four times those of all tasks;
single ones differ by up to 0.5 and 0.8."""


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("own", ["float32", "bfloat16"])
def test_log_probabilities_are_near_those_of_the_plain_cache(dtype: str, own: str) -> None:
    """The log probabilities of the right answers to the first held-out tasks."""
    tokenizer = AutoTokenizer.from_pretrained(NANO)
    lines = (NANO / "heldout.jsonl").read_text().splitlines()[:60]
    texts, starts = [], []
    for task in map(json.loads, lines):
        prompt = tokenizer.apply_chat_template(task["messages"], add_generation_prompt=True)
        prompt = list(prompt["input_ids"])
        starts.append(len(prompt))
        texts.append(prompt + tokenizer(task["answer"], add_special_tokens=False)["input_ids"])
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = {}
    for each in ("auto", dtype):
        with engine(NANO, each, **{"model.dtype": own}) as llm:
            outputs = llm.generate(texts, params)
            found[each] = [
                output.prompt_logprobs[place][text[place]].logprob
                for output, text, start in zip(outputs, texts, starts, strict=True)
                for place in range(start, len(text))
            ]
    plain, quantized = (torch.tensor(found[each]) for each in ("auto", dtype))
    difference = (plain - quantized).abs()
    assert 0 < difference.mean() < BOUNDS[dtype]
    assert difference.max() < 1


@pytest.mark.parametrize("own", ["float32", "bfloat16"])
def test_more_blocks_fit_into_the_same_memory(own: str) -> None:
    found = {}
    for dtype in ("auto", *TYPES):
        settings = {"model.device": "cpu", "model.dtype": own, "cache.dtype": dtype}
        settings |= {"cache.memory_bytes": 3_000_000, "scheduler.max_rows": 4096}
        worker = Worker(load(str(NANO), settings))
        worker.load()
        found[dtype] = worker.measure().num_blocks
        (layer, *_) = worker._built_model.attention_layers()
        worker.shutdown()
    expected = found["auto"] * layer.head_dim * (4 if own == "float32" else 2)
    for dtype in TYPES:
        assert found[dtype] == pytest.approx(expected / (layer.head_dim + 4), rel=0.01)


def test_an_unknown_type_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"cache\.dtype.*int4"):
        load({"model": {"path": "m"}, "cache": {"dtype": "int4"}})


def test_an_engine_with_another_type_is_another_version() -> None:
    plain, other = (load({"model": {"path": "m"}, "cache": {"dtype": d}}) for d in ("auto", "int8"))
    assert config_hash(plain) != config_hash(other)
    assert "cache.dtype" in versioned_keys()


def refuse(
    dtype: str, layer: Attention, own: torch.dtype, device: str, exact: bool = False
) -> None:
    config = load({"model": {"path": "m", "exact": exact}, "cache": {"dtype": dtype}})
    kv_cache.refuse_unquantizable(config, [layer], own, torch.device(device))


def test_models_without_a_cache_are_refused() -> None:
    layer = Attention(2, 2, 8, 1.0, lookahead=1)
    refuse("auto", layer, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"cache\.dtype=int8.*no K and V are kept.*auto"):
        refuse("int8", layer, torch.float32, "cpu")


def test_types_and_heads_that_a_gpu_cannot_read_are_refused() -> None:
    odd, even = Attention(2, 2, 6, 1.0), Attention(2, 2, 8, 1.0)
    refuse("fp8", odd, torch.float32, "cpu")
    refuse("fp8", even, torch.bfloat16, "cuda")
    with pytest.raises(ValueError, match=r"cache\.dtype=fp8.*heads of 6.*multiple of 4"):
        refuse("fp8", odd, torch.float16, "cuda")
    with pytest.raises(ValueError, match=r"cache\.dtype=int8.*model\.dtype=bfloat16 or float16"):
        refuse("int8", even, torch.float32, "cuda")
    with pytest.raises(ValueError, match=r"cache\.dtype=int8.*model\.exact=false"):
        refuse("int8", even, torch.bfloat16, "cuda", exact=True)
