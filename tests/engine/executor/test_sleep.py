"""Engines that sleep: what they release, when they sleep and wake up, and that requests only notice
a delay."""

from __future__ import annotations

import gc
import os
import shutil
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from swell.cluster.local import LLM
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.configs.runtime.process import freeze_gc
from swell.configs.schema import CacheConfig, Config, ModelConfig
from swell.coordinator.manager_state import DesiredState, ManagerState, Sleep
from swell.coordinator.wire import (
    Broken,
    CoordinatorHeartbeat,
    EngineHello,
    EngineReport,
    Pause,
    Paused,
    Repaired,
    Resume,
)
from swell.engine.executor import ExecutorError, GroupBroken, WorkerLost
from swell.kernels.linear import PackedTensor
from swell.worker.layers.packed_weight import PackedWeight
from swell.worker.memory.sleep import SleepingWeights, collect_frozen
from swell.worker.model_interfaces import moe_layers
from swell.worker.wire import GroupPlan, Regrouped
from swell.worker.worker import Worker
from tests.engine.executor.fake_worker import expected
from tests.engine.executor.test_recovery import CoordinatorInbox, Harness, make_harness
from tests.engine.serving.test_server import Engine, request
from tests.support import paths
from tests.support.deadlines import HANG_S
from tests.worker import tiny_models

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ["count from 3 to 9", "spell: house"]
NANO = str(paths.NANO)


@pytest.fixture
def harness() -> Iterator[Harness]:
    yield from make_harness()


class Plans:
    """Records the group plans of the engine's executor; the next one may fail."""

    def __init__(self, engine: Engine) -> None:
        self.levels: list[int] = []
        self.error: ExecutorError | None = None
        self._regroup = engine.executor.regroup
        engine.executor.regroup = self._on_plan

    def _on_plan(self, groups: GroupPlan) -> list[Regrouped]:
        self.levels.append(groups.sleep_level)
        error, self.error = self.error, None
        if error is not None:
            raise error
        return self._regroup(groups)


def fall_asleep(inbox: CoordinatorInbox, level: int) -> None:
    inbox.inbox.send(inbox.peer, Pause(0))
    inbox.until(Paused)
    desire_sleep(inbox, level)
    until_asleep(inbox, level)


def desire_sleep(inbox: CoordinatorInbox, level: int) -> None:
    desire_sleep.age += 1  # type: ignore[attr-defined]
    state = ManagerState(
        DesiredState("m", pause_requested=True, sleep=Sleep(level), term=desire_sleep.age)
    )  # type: ignore[attr-defined]
    inbox.inbox.send(inbox.peer, CoordinatorHeartbeat(0, state))


desire_sleep.age = 0  # type: ignore[attr-defined]


def until_asleep(inbox: CoordinatorInbox, level: int) -> None:
    while inbox.until(EngineReport).sleep_level != level:
        """Skips reports from before the pause."""


@pytest.mark.parametrize("level", [1, 2])
def test_a_paused_engine_falls_asleep_and_continues_when_it_is_resumed(
    harness: Harness, level: int
) -> None:
    engine, inbox = harness
    plans = Plans(engine)
    inbox.until(EngineHello)
    client = engine.client()
    engine.executor.step_s = 0.02
    client.send(request("r", [1], max_tokens=300))
    client.receive_until(lambda: bool(client.tokens))
    fall_asleep(inbox, level)
    engine.executor.step_s = 0.001
    steps = engine.server.core.num_steps
    client.send(request("late", [2]))
    while client.receive(0.2):
        pass
    assert engine.server.core.num_steps == steps and not client.ended
    inbox.inbox.send(inbox.peer, Resume(0))
    assert inbox.until(Broken).repairing, "ingresses use others while it wakes up"
    inbox.until(Repaired)
    client.receive_until(lambda: len(client.ended) == 2)
    assert client.tokens["r"] == expected(request("r", [1], max_tokens=300))
    assert plans.levels == [level, 0]
    client.wait_until_idle()


def test_wake_ups_are_counted_when_complete(harness: Harness) -> None:
    """An engine counts a wake-up once it is awake. A larger `repairs` than expected tells the
    coordinator that a `Repaired` was lost, and `is_repairing` that a `Broken` was lost. A wake-up
    replaces no worker, so it has a counter of its own."""
    engine, inbox = harness
    inbox.until(EngineHello)
    fall_asleep(inbox, 2)
    inbox.received.clear()
    inbox.inbox.send(inbox.peer, Resume(0))
    before: list[EngineReport] = []
    while isinstance(message := inbox.until(EngineReport | Repaired), EngineReport):
        before.append(message)
    assert before and {(report.repairs, report.wakes) for report in before} == {(0, 0)}
    inbox.received.clear()
    while not (report := inbox.until(EngineReport)).repairs:
        """Skips a report that was sent together with `Repaired`."""
    assert (report.repairs, report.wakes) == (1, 1)
    assert before[-1].is_repairing and not report.is_repairing
    assert engine.server.repairs == 1


def test_the_sleep_level_only_increases(harness: Harness) -> None:
    engine, inbox = harness
    plans = Plans(engine)
    inbox.until(EngineHello)
    fall_asleep(inbox, 1)
    desire_sleep(inbox, 2)
    until_asleep(inbox, 2)
    desire_sleep(inbox, 1)
    inbox.until(EngineReport)
    assert plans.levels == [1, 2]


def test_an_engine_sleeps_only_while_it_is_paused(harness: Harness) -> None:
    engine, inbox = harness
    plans = Plans(engine)
    inbox.until(EngineHello)
    desire_sleep(inbox, 2)
    client = engine.client()
    client.send(request("r", [1], max_tokens=50))
    client.receive_until(lambda: bool(client.ended))
    assert plans.levels == []


@pytest.mark.parametrize("error", [WorkerLost("worker 1 died"), GroupBroken("a peer has gone")])
def test_a_failure_while_falling_asleep_is_recovered(
    harness: Harness, error: ExecutorError
) -> None:
    """A failure while the engine falls asleep is recovered from: it serves again for a moment,
    because only an awake engine is known to be intact, and then sleeps."""
    engine, inbox = harness
    plans = Plans(engine)
    inbox.until(EngineHello)
    plans.error = error
    fall_asleep(inbox, 1)
    assert plans.levels == [1, 0, 1]
    inbox.inbox.send(inbox.peer, Resume(0))
    client = engine.client()
    client.send(request("r", [1], max_tokens=50))
    client.receive_until(lambda: bool(client.ended))
    assert client.tokens["r"] == expected(request("r", [1], max_tokens=50))


@pytest.mark.parametrize("error", [WorkerLost("worker 1 died"), GroupBroken("a peer has gone")])
def test_a_failure_while_waking_up_is_recovered(harness: Harness, error: ExecutorError) -> None:
    engine, inbox = harness
    plans = Plans(engine)
    inbox.until(EngineHello)
    fall_asleep(inbox, 2)
    plans.error = error
    inbox.inbox.send(inbox.peer, Resume(0))
    inbox.until(Repaired)
    client = engine.client()
    client.send(request("r", [1], max_tokens=50))
    client.receive_until(lambda: bool(client.ended))
    assert client.tokens["r"] == expected(request("r", [1], max_tokens=50))
    assert plans.levels == [2, 0, 0]


def test_a_pause_during_a_wake_up_keeps_the_engine_asleep(harness: Harness) -> None:
    engine, inbox = harness
    plans = Plans(engine)
    inbox.until(EngineHello)
    fall_asleep(inbox, 1)
    inbox.inbox.send(inbox.peer, Resume(0))
    inbox.inbox.send(inbox.peer, Pause(0))
    inbox.until(Paused)
    deadline = time.monotonic() + HANG_S
    while engine.server.core.memory.sleep_level != 1 or plans.levels not in ([1], [1, 0, 1]):
        assert time.monotonic() < deadline, plans.levels
        time.sleep(0.01)


# ---------------------------------------------------------------- workers


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_worker_holds_no_cache_and_at_level_2_no_weights(level: int) -> None:
    """A sleeping engine holds no cache, and at level 2 no weights. Afterwards it finds no prefix:
    its blocks are gone."""
    with LLM(NANO, **{"model.device": "cpu", "cache.memory_bytes": 4_000_000}) as llm:
        before = [list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, GREEDY)]
        assert llm.generate(PROMPTS[0], GREEDY)[0].num_cached_tokens > 0
        worker = llm._engine.core.executor._worker  # type: ignore[attr-defined]
        cache = weakref.ref(worker.model.attention_layers()[0].k_cache)
        weights = weakref.ref(next(worker.model.parameters()))
        llm._engine.core.memory.set_sleep(level)
        gc.collect()
        assert cache() is None and (weights() is None) == (level == 2)
        assert worker.runner is None
        llm._engine.core.memory.set_sleep(0)
        again = llm.generate(PROMPTS, GREEDY)
        assert [o.num_cached_tokens for o in again] == [0, 0]
        assert [list(o.outputs[0].token_ids) for o in again] == before


def test_the_memory_is_returned_to_the_system(tmp_path: Path) -> None:
    tiny_models.make(tmp_path, "llama", hidden_size=512, intermediate_size=2048, vocab_size=8000)
    for file in Path(NANO).glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    with LLM(str(tmp_path), **{"model.device": "cpu", "cache.memory_bytes": 100_000_000}) as llm:
        worker = llm._engine.core.executor._worker  # type: ignore[attr-defined]
        caches = [
            c for layer in worker.model.attention_layers() for c in (layer.k_cache, layer.v_cache)
        ]
        cached = sum(cache.fill_(1).nbytes for cache in caches)
        del caches
        weights = (tmp_path / "model.safetensors").stat().st_size
        awake = resident()
        llm._engine.core.memory.set_sleep(1)
        without_cache = resident()
        assert awake - without_cache > 0.9 * cached > 40e6
        assert llm._engine.core.memory.freed_bytes > 0.9 * cached
        llm._engine.core.memory.set_sleep(2)
        assert without_cache - resident() > 0.9 * weights > 25e6
        assert llm._engine.core.memory.freed_bytes > 0.9 * (cached + weights)
        llm._engine.core.memory.set_sleep(0)
        assert llm._engine.core.memory.freed_bytes == 0


@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_a_process_with_frozen_garbage_collection_frees_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Literal["native", "transformers"]
) -> None:
    """A process that has excluded its objects from garbage collection, as workers do at their
    start, still releases weights. Models of transformers have reference cycles."""
    for module in ("swell.worker.memory.sleep", "swell.worker.worker"):
        monkeypatch.setattr(f"{module}.collect_frozen", collect_frozen)
    tiny_models.make(tmp_path, "llama")
    model = ModelConfig(path=str(tmp_path), device="cpu", backend=backend)
    worker = Worker(Config(model=model, cache=CacheConfig(memory_bytes=4_000_000)))
    try:
        worker.load()
        limits = worker.measure()
        worker.init_cache(limits.num_blocks, limits.max_model_len)
        freeze_gc()
        for generation in (1, 3):
            weights = weakref.ref(next(worker.model.parameters()))
            worker.regroup(GroupPlan(generation, sleep_level=2))
            assert weights() is None
            worker.regroup(GroupPlan(generation + 1))
            assert worker.runner is not None and gc.get_freeze_count() > 0
    finally:
        worker.shutdown()
        del worker
        gc.unfreeze()
        freeze_gc()


def resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_experts_and_packed_weights_sleep_too(tmp_path: Path) -> None:
    """They are moved too: they are not parameters, and are most of the weights."""
    tiny_models.make(tmp_path, "mixtral")
    model = ModelConfig(path=str(tmp_path), device="cpu")
    worker = Worker(Config(model=model, cache=CacheConfig(memory_bytes=4_000_000)))
    try:
        worker.load()
        experts = [w for layer in moe_layers(worker.model) for w in layer.local_experts.values()]
        tensors = [weight.data for expert in experts for weight in expert]
        layers = [module for module in worker.model.modules() if isinstance(module, PackedWeight)]
        assert any(isinstance(layer.weight, PackedTensor) for layer in layers)
        tensors += [layer.weight.data for layer in layers]
        wanted = [tensor.clone() for tensor in tensors]
        sleeping = SleepingWeights(worker.model)
        assert len(tensors) > 8 and not any(t.untyped_storage().nbytes() for t in tensors)
        taken = [torch.empty_like(tensor) for tensor in wanted]  # the memory of the experts
        sleeping.wake()
        assert taken and all(map(torch.equal, tensors, wanted))
        for layer in moe_layers(worker.model):
            for expert, weights in layer.local_experts.items():
                addresses = [weight.data.data_ptr() for weight in weights]
                assert layer.local_experts.addresses[:, expert].tolist() == addresses
    finally:
        worker.shutdown()


def test_tensors_that_share_memory_share_it_after_a_sleep() -> None:
    """Tensors that share memory, as fused and tied weights do on a GPU, share it after a
    wake-up."""
    model = nn.Linear(4, 6)
    model.register_parameter("tied", model.weight)
    model.register_buffer("part", model.weight.detach()[:3])
    model.register_buffer("empty", torch.empty(0))
    wanted, bias = model.weight.detach().clone(), model.bias.detach().clone()
    sleeping = SleepingWeights(model)
    assert sleeping.nbytes == wanted.nbytes + bias.nbytes
    assert model.weight.untyped_storage().nbytes() == model.bias.untyped_storage().nbytes() == 0
    sleeping.wake()
    assert torch.equal(model.weight, wanted) and torch.equal(model.bias, bias)
    model.weight.data[0, 0] = 7.0
    assert model.part[0, 0] == 7.0
