"""Greedy answers of the whole GPU path against transformers' `generate`, token for token.

Every family, over every way to split, schedule and cache the work. The models run in float32, where
only rounding differs, by far less than the gap between the first and the second token.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers

from swell.configs.schema import load
from swell.engine.core import EngineCore
from swell.engine.executor import build_executor
from swell.engine.wire import EngineCoreOutput, EngineCoreRequest
from swell.worker.sampler_wire import SamplerParams
from tests.engine.executor.depth import keeping_depth, record_depth
from tests.support.device import DEVICE, on_device
from tests.worker import tiny_models

pytestmark = pytest.mark.slow

NATIVE = ["llama-llama3", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe-mixed"]
GENERIC = ["gpt_neox", "starcoder2"]
NEW_TOKENS = 12

_rng = random.Random(5)
PROMPTS = [[_rng.randrange(3, 300) for _ in range(n)] for n in (1, 3, 40, 17, 8, 33)]
PROMPTS.append([*PROMPTS[2][:32], 7, 8])  # shares a prefix of two blocks with another prompt


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory):
    root = tmp_path_factory.mktemp("models")

    @cache
    def make(family: str) -> Path:
        tiny_models.make(root / family, family)
        return root / family

    return make


@pytest.fixture(scope="session")
def truth(folder):
    """Returns a function to the answers of transformers, one prompt at a time."""

    @cache
    def answers(family: str) -> list[list[int]]:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder(family), dtype=torch.float32
        ).eval()
        model.generation_config.eos_token_id = None
        return [
            model.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0
            )[0, len(prompt) :].tolist()
            for prompt in PROMPTS
        ]

    return answers


class Engine:
    """A core with workers in this process."""

    def __init__(self, path: Path, **overrides: object) -> None:
        settings = {
            "model.dtype": "float32",
            "parallel.executor": "inproc",
            "cache.memory_bytes": 8_000_000,
            "scheduler.max_rows": 8,
            **{key.replace("__", "."): value for key, value in overrides.items()},
        }
        config = load(str(path), on_device(settings))
        depth = overrides.get("scheduler__steps_in_flight", 1)
        with keeping_depth() if depth != 1 else nullcontext():
            executor = build_executor(config)
        self.core = EngineCore(config, executor, executor.start())
        self.depths = record_depth(self.core)

    def answer(self, requests: list[EngineCoreRequest]) -> dict[str, list[EngineCoreOutput]]:
        outputs: dict[str, list[EngineCoreOutput]] = {}
        for request in requests:
            assert self.core.add_request(request, b"test") is None
        while self.core.has_work:
            for answer in self.core.step().get(b"test", []):
                outputs.setdefault(answer.request_id, []).append(answer)
        self.core.check_idle()
        return outputs

    def greedy(self, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
        outputs = self.answer(
            [
                EngineCoreRequest(str(i), prompt, SamplerParams(), NEW_TOKENS)
                for i, prompt in enumerate(prompts)
            ]
        )
        return [tokens(outputs[str(i)]) for i in range(len(prompts))]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_error: object) -> None:
        self.core.shutdown()


def tokens(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


SPLITS = {
    "one worker": {},
    "tensor 2": {"parallel__tensor": 2},
    "pipeline 2": {"parallel__pipeline": 2},
    "tensor 2 x pipeline 2": {"parallel__tensor": 2, "parallel__pipeline": 2},
}
SCHEDULES = {
    "depth 1": {"scheduler__steps_in_flight": 1},
    "depth 2": {"scheduler__steps_in_flight": 2},
    "depth 3, chunks of 7": {
        "scheduler__steps_in_flight": 3,
        "scheduler__max_chunk_tokens": 7,
    },
    "chunks of 1": {"scheduler__max_chunk_tokens": 1},
    "a budget of 7": {"scheduler__max_tokens_per_step": 7},
    "no prefix cache": {"cache__prefix_caching": False},
    "one row at a time": {"scheduler__max_rows": 1},
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("family", NATIVE + GENERIC)
def test_splits(family, split, folder, truth):
    with Engine(folder(family), **SPLITS[split]) as engine:
        assert engine.greedy() == truth(family)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", ["llama-llama3", "mistral", "gpt_neox"])
def test_schedules(family, schedule, folder, truth):
    with Engine(folder(family), **SCHEDULES[schedule]) as engine:
        assert engine.greedy() == truth(family)
        default = 1 if DEVICE == "cpu" else 2
        assert max(engine.depths) == SCHEDULES[schedule].get("scheduler__steps_in_flight", default)


@pytest.mark.parametrize("schedule", ["depth 1", "depth 3, chunks of 7"])
def test_schedules_over_four_workers(schedule, folder, truth):
    split = SPLITS["tensor 2 x pipeline 2"]
    with Engine(folder("qwen3"), **split, **SCHEDULES[schedule]) as engine:
        assert engine.greedy() == truth("qwen3")
        assert max(engine.depths) == SCHEDULES[schedule]["scheduler__steps_in_flight"]


@pytest.mark.parametrize("split", ["one worker", "tensor 2 x pipeline 2"])
@pytest.mark.parametrize("family", ["mistral", "qwen3", "starcoder2"])
def test_a_warm_prefix_cache_changes_nothing(family, split, folder, truth):
    with Engine(folder(family), **SPLITS[split]) as engine:
        cold = engine.greedy()
        hits = engine.core.scheduler.kv.num_hit_tokens
        warm = engine.greedy()
        assert engine.core.scheduler.kv.num_hit_tokens > hits
        assert cold == warm == truth(family)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("split", ["one worker", "tensor 2 x pipeline 2"])
def test_preemption_changes_nothing(split, prefix_caching, folder, truth):
    cramped = {
        "cache__memory_bytes": 8192 * 16 // (4 if "x" in split else 1),
        "cache__block_tokens": 4,
        "cache__prefix_caching": prefix_caching,
        "scheduler__steps_in_flight": 2,
    }
    with Engine(folder("llama-llama3"), **SPLITS[split], **cramped) as engine:
        assert engine.core.limits.num_blocks == 16
        assert engine.greedy() == truth("llama-llama3")
        assert engine.core.scheduler.num_preemptions > 0
        assert max(engine.depths) == 2


def sampled(name: str, prompt: list[int], seed: int) -> EngineCoreRequest:
    params = SamplerParams(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=seed)
    return EngineCoreRequest(name, prompt, params, 20)


def test_a_seeded_answer_is_the_same_in_any_batch_and_after_preemption(folder):
    path = folder("qwen2")
    wanted = sampled("it", PROMPTS[3], seed=1234)
    crowd = [sampled(f"c{i}", PROMPTS[i % 7], seed=i) for i in range(31)]
    with Engine(path) as engine:
        alone = tokens(engine.answer([wanted])["it"])
    with Engine(path, scheduler__max_rows=32) as engine:
        among = engine.answer([*crowd[:15], wanted, *crowd[15:]])
    assert len({tuple(tokens(o)) for o in among.values()}) > 25, "seeds matter"
    with Engine(path, cache__block_tokens=4, cache__memory_bytes=8192 * 16) as engine:
        cramped = engine.answer([*crowd[:6], wanted])
        assert cramped["it"][-1].num_preemptions > 0
    assert alone == tokens(among["it"]) == tokens(cramped["it"])


def test_resumption_continues_an_answer(folder, truth):
    whole = truth("mistral")[3]
    with Engine(folder("mistral")) as engine:
        half = EngineCoreRequest(
            "r", PROMPTS[3], SamplerParams(), NEW_TOKENS, output_token_ids=whole[:5]
        )
        assert tokens(engine.answer([half])["r"]) == whole[5:]
