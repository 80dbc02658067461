"""A worker captures its steps once, when the cache and all groups exist that they use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swell.configs.schema import load
from swell.worker.model_interfaces import moe_layers
from swell.worker.runner import ModelRunner
from swell.worker.wire import GroupPlan
from swell.worker.worker import Worker
from tests.worker import tiny_models


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[ModelRunner]:
    """Returns the runners that have captured their steps, so far."""
    runners: list[ModelRunner] = []
    monkeypatch.setattr(
        ModelRunner, "capture_steps", lambda runner, _on_progress: runners.append(runner)
    )
    return runners


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make_worker(family: str, **parallel: object) -> Worker:
        tiny_models.make(tmp_path, family)
        source = {
            "model": {"path": str(tmp_path), "device": "cpu", "cpu_threads": 1},
            "parallel": parallel,
            "cache": {"memory_bytes": 1_000_000},
        }
        made.append(Worker(load(source)))
        return made[-1]

    yield make_worker
    for worker in made:
        worker.shutdown()


def test_a_worker_of_a_new_engine_captures_with_its_cache(
    make: Callable[..., Worker], captures: list[ModelRunner]
) -> None:
    worker = make("llama")
    worker.load()
    worker.regroup(GroupPlan(1))
    limits = worker.measure()
    assert not captures
    worker.init_cache(limits.num_blocks, limits.max_model_len)
    assert captures == [worker.runner]
    worker.regroup(GroupPlan(2))
    assert len(captures) == 1, "later steps are captured when they occur"


def test_a_replacement_captures_with_its_groups(
    make: Callable[..., Worker], captures: list[ModelRunner]
) -> None:
    worker = make("llama")
    worker.load()
    worker.init_cache(8, 64)
    assert not captures, "a step may contain operations of groups"
    worker.regroup(GroupPlan(7))
    assert captures == [worker.runner]


def test_experts_are_placed_when_the_cache_has_its_memory(
    make: Callable[..., Worker], captures: list[ModelRunner]
) -> None:
    """An engine that shares experts does not know the other engines yet when it starts, so it would
    load all experts."""
    worker = make("mixtral", expert=True)
    worker.load()
    worker.regroup(GroupPlan(1))
    limits = worker.measure()
    worker.init_cache(limits.num_blocks, limits.max_model_len)
    layers = moe_layers(worker._built_model)
    assert layers and not any(list(layer.local_experts) for layer in layers)
    assert not captures
    worker.regroup(GroupPlan(2))
    assert all(list(layer.local_experts) for layer in layers)
    assert captures == [worker.runner]
