"""The steps of the profile run are ones that a scheduler may send and a worker accepts, and leave
no trace. `test_gpu_memory.py` tests the size of the cache that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import swell.worker.worker as worker_module
from swell.configs.schema import load
from swell.engine.core import EngineCore
from swell.engine.executor import build_executor
from swell.engine.wire import EngineCoreRequest
from swell.worker.memory import kv_cache
from swell.worker.memory.gpu_memory import MemoryUse
from swell.worker.memory.profile_run import LargestSteps
from swell.worker.sampler_wire import PoolingParams, SamplerParams
from swell.worker.wire import GroupPlan, WorkerLimits
from swell.worker.worker import Worker
from tests.support.paths import NANO
from tests.support.weights import eagle_heads, pooled_models
from tests.worker import tiny_models
from tests.worker.moe import moe_engines
from tests.worker.moe.moe_engines import EngineGroup

STEP_TOKENS = 40
ROWS = 6


@given(st.data())
def test_plans_are_as_large_as_allowed_and_not_larger(data: st.DataObject) -> None:
    draw = data.draw
    most_tokens, most_rows = draw(st.integers(1, 300)), draw(st.integers(1, 40))
    method = draw(st.sampled_from(["none", "ngram", "mtp"]))
    drafts = {
        "method": method,
        "max_tokens": draw(st.integers(1, 9)),
        "max_step_tokens": draw(st.integers(2, 99)),
    }
    config = load(
        {
            "model": {"path": "m"},
            "scheduler": {"max_tokens_per_step": most_tokens, "max_rows": most_rows},
            "cache": {"block_tokens": draw(st.sampled_from([1, 4, 16]))},
            "drafts": drafts,
        }
    )
    length, keeps_kv = draw(st.integers(1, 200)), draw(st.booleans())
    samples = method != "none" or draw(st.booleans())
    steps = LargestSteps(
        config=config, max_model_len=length, vocab_size=50, samples=samples, keeps_kv=keeps_kv
    )
    plans = steps.plans()
    rows_in_all = min(most_rows, most_tokens)
    assert sum(plans[0].num_tokens) == min(
        most_tokens,
        sum(
            min(length, n)
            for n in [
                most_tokens // rows_in_all + (at < most_tokens % rows_in_all)
                for at in range(rows_in_all)
            ]
        ),
    )
    assert len(plans[0].slots) == rows_in_all
    assert plans[1].num_tokens == [min(most_tokens, length)]
    assert plans[1].starts[0] + plans[1].num_tokens[0] == (
        length if keeps_kv else plans[1].num_tokens[0]
    )
    for plan in plans:
        assert sum(plan.num_tokens) <= most_tokens and len(plan.slots) <= most_rows
        for row, request in enumerate(plan.new_requests):
            end, drafted = plan.starts[row] + plan.num_tokens[row], plan.drafts.get(row, [])
            proposed = plan.proposals.get(row, 0)
            assert request.slot == plan.slots[row] and len(request.token_ids) == end - len(drafted)
            assert len(request.token_ids) > 0 and end + proposed <= length
            places = len(request.block_ids) * config.cache.block_tokens
            assert (
                end + proposed
                <= places
                <= (length // config.cache.block_tokens + 1) * (config.cache.block_tokens)
            )
            assert plan.samples[row] == (1 + len(drafted) if samples else 0) <= plan.num_tokens[row]
    drafted = sum(map(len, plans[-1].drafts.values()))
    assert drafted <= config.drafts.step_tokens


def make_llama(folder: Path) -> dict[str, Any]:
    tiny_models.make(folder, "llama")
    return {"model.path": str(folder)}


def make_family(family: str, **settings: Any) -> Callable[[Path], dict[str, Any]]:
    def make(folder: Path) -> dict[str, Any]:
        tiny_models.make(folder, family)
        return {"model.path": str(folder), **settings}

    return make


def make_pooled(family: str) -> Callable[[Path], dict[str, Any]]:
    def make(folder: Path) -> dict[str, Any]:
        pooled_models.make(folder, family, modes={"pooling_mode_mean_tokens": True})
        return {"model.path": str(folder)}

    return make


def with_draft_model(folder: Path) -> dict[str, Any]:
    return {
        **make_llama(folder),
        "drafts.method": "model",
        "drafts.model": {"path": str(folder)},
        "drafts.max_step_tokens": 20,
    }


def with_head(folder: Path) -> dict[str, Any]:
    head = eagle_heads.make(folder / "head", "eagle3", str(NANO))
    return {"model.path": str(NANO), "drafts.method": "eagle3", "drafts.model": {"path": head}}


KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "llama": make_llama,
    "n-gram drafts": make_family("llama", **{"drafts.method": "ngram"}),
    "draft model": with_draft_model,
    "draft head": with_head,
    "tensor 2": make_family("llama", **{"parallel.tensor": 2}),
    "pipeline 2": make_family("llama", **{"parallel.pipeline": 2}),
    "experts": make_family("mixtral", **{"model.routed_experts": True}),
    "transformers": make_family("gpt_neox"),
    "adapters": make_family("llama", **{"lora.enabled": True}),
    "encoder": make_pooled("bert"),
    "embedding decoder": make_pooled("qwen3"),
}


def answers(settings: dict[str, Any]) -> dict[str, list[Any]]:
    """Returns the tokens and extras of requests of a new engine."""
    config = load(
        settings["model.path"],
        {
            "model.device": "cpu",
            "model.cpu_threads": 1,
            "parallel.executor": "inproc",
            "cache.memory_bytes": 1_000_000,
            "scheduler.max_rows": ROWS,
            "scheduler.max_tokens_per_step": STEP_TOKENS,
            "scheduler.steps_in_flight": 2,
            **{key: value for key, value in settings.items() if key != "model.path"},
        },
    )
    executor = build_executor(config)
    core = EngineCore(config, executor, executor.start())
    try:
        return collect(core)
    finally:
        core.shutdown()


def collect(core: EngineCore) -> dict[str, list[Any]]:
    greedy = SamplerParams(logprobs=2, prompt_logprobs=1)
    drawn = SamplerParams(temperature=0.9, seed=7, repetition_penalty=1.2, logprobs=1)
    count = 9
    if not core.limits.samples:
        greedy, drawn, count = (SamplerParams(pooling=PoolingParams()),) * 2 + (0,)
    for name, sampler in (("greedy", greedy), ("drawn", drawn)):
        for length in (3, 30):
            prompt = [5 + position % 30 for position in range(length)]
            request = EngineCoreRequest(f"{name} {length}", prompt, sampler, count)
            assert core.add_request(request, b"test") is None
    found: dict[str, list[Any]] = {}
    while core.has_work:
        for output in core.step().get(b"test", []):
            found.setdefault(output.request_id, []).append((output.new_token_ids, output.extras))
    core.check_idle()
    assert len(found) == 4
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_accepts_a_profile_run_and_answers_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    settings = KINDS[kind](tmp_path)
    plain = answers(settings)
    computed = profile_in_measure(monkeypatch)
    assert answers(settings) == plain
    assert computed and set(computed) == {STEP_TOKENS}


@pytest.mark.slow
@pytest.mark.parametrize("balance_steps", [0, 1])
def test_engines_that_share_experts_profile_without_experts(
    tiny_moe: Any, monkeypatch: pytest.MonkeyPatch, balance_steps: int
) -> None:
    folder, truth = tiny_moe("mixtral")
    computed = profile_in_measure(monkeypatch)
    sizes = {"scheduler__max_tokens_per_step": STEP_TOKENS, "cache__memory_bytes": 1_000_000}
    sizes["parallel__balance_steps"] = balance_steps
    with EngineGroup(folder, **sizes) as engine_group:
        engine_group.regroup(engine_group.add(), engine_group.add())
        assert moe_engines.answers(engine_group, [[0, 1], [2, 3]]) == truth[:4]
    assert computed == [STEP_TOKENS] * 2


def profile_in_measure(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets workers on a CPU compute the largest steps before they measure; returns their tokens."""
    computed: list[int] = []
    real = Worker.measure

    def measure(worker: Worker) -> WorkerLimits:
        assert worker._shape is not None and worker.runner is None
        model = worker._built_model
        steps = LargestSteps.of(worker.config, model, worker._shape)
        assert list(worker.profile(steps)) == [0, 0, 0], "a CPU has no captures of fixed sizes"
        assert worker.runner is None
        assert not any(layer.k_cache.numel() for layer in model.attention_layers())
        computed.append(max(sum(plan.num_tokens) for plan in steps.plans()))
        return real(worker)

    monkeypatch.setattr(Worker, "measure", measure)
    return computed


def test_a_refused_step_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_models.make(tmp_path, "llama")
    worker = Worker(load({"model": {"path": str(tmp_path), "device": "cpu", "cpu_threads": 1}}))
    try:
        worker.load()
        worker.regroup(GroupPlan(1))
        assert worker._shape is not None
        steps = LargestSteps.of(worker.config, worker._built_model, worker._shape)
        monkeypatch.setattr(
            LargestSteps, "_params", lambda *_: SamplerParams(allowed_token_ids=[10**6])
        )
        with pytest.raises(AssertionError, match="the largest step 0 is refused"):
            next(worker.profile(steps))
    finally:
        worker.shutdown()


class ComputedMemory(NamedTuple):
    """Stands for `GpuMemory`: computes the steps of a worker on a CPU."""

    device: torch.device
    share: float

    def measure(self, profile: Callable[[], Iterator[int | None]]) -> MemoryUse:
        for _event in profile():
            pass
        return MemoryUse(10**9, 0, 10**9, 0, 0, 0)


@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_all_workers_of_an_engine_compute_the_same_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    """Each worker has another amount of free memory, and all of them compute the operations of
    their groups together."""
    tiny_models.make(tmp_path, "llama")
    blocks, block_bytes = {0: 9, 1: 4}, 1000
    lengths: list[int] = []
    measure, profile = Worker.measure, Worker.profile

    def measure_gpu(worker: Worker) -> WorkerLimits:
        worker.device = torch.device("cuda", worker.rank)
        return measure(worker)

    def profile_on_cpu(worker: Worker, steps: LargestSteps) -> Iterator[int | None]:
        worker.device = torch.device("cpu")
        lengths.append(steps.max_model_len)
        yield from profile(worker, steps)

    def free_bytes(device: torch.device, *_shares: float) -> int:
        return blocks[device.index] * block_bytes

    monkeypatch.setattr(Worker, "measure", measure_gpu)
    monkeypatch.setattr(Worker, "profile", profile_on_cpu)
    monkeypatch.setattr(worker_module, "GpuMemory", ComputedMemory)
    monkeypatch.setattr(worker_module, "block_bytes", lambda *_model: block_bytes)
    monkeypatch.setattr(kv_cache, "free_bytes", free_bytes)
    overrides = {
        "model.device": "cpu",
        "model.cpu_threads": 1,
        f"parallel.{split}": 2,
        "parallel.executor": "inproc",
        "scheduler.max_rows": 1,
        "cluster.start_timeout_s": 20.0,
    }
    executor = build_executor(load(str(tmp_path), overrides))
    executor.start()
    executor.shutdown()
    assert lengths == [4 * 16] * 2
