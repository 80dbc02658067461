"""The memory of all captured steps, from captures of a real model on a card that is simulated.

The graphs of the card share one pool of memory, as those of `kernels/triton/graph.py` do: a capture
takes one more part for it only if it needs more than each part has. Each graph also keeps its
results and its operations.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor

from swell.configs.schema import load
from swell.kernels import backends
from swell.kernels.host.dispatch_mode import DispatchMode
from swell.kernels.lora import LoraTokens
from swell.kernels.reference.lora import ReferenceLora
from swell.worker.memory import gpu_memory
from swell.worker.memory.gpu_memory import GpuMemory
from swell.worker.memory.profile_run import PROFILE_BLOCKS, LargestSteps, _Row
from swell.worker.wire import GroupPlan
from swell.worker.worker import Worker
from tests.worker import tiny_models
from tests.worker.fixed_graphs import FixedGraph, FixedGraphs
from tests.worker.memory.test_gpu_memory import GIB, FakeGpu

OPERATION = 1 << 13
"""Bytes of one operation of a graph."""
SCALE = 1 << 8
"""The bytes of the card for one byte of a tensor, so that tensors are larger than operations."""


class Operations(DispatchMode):
    """Counts operations, and notes the largest tensor that one of them computes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += 1
        if isinstance(result, Tensor):
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result


@pytest.fixture(autouse=True)
def older_objects_are_kept() -> Iterator[None]:
    """Collecting all objects of a long test process takes seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


class GraphGpu(FakeGpu):
    """A card with the memory of captures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, graphs: FixedGraphs) -> None:
        super().__init__(monkeypatch, weights=GIB, other=GIB)
        monkeypatch.setattr(gpu_memory, "collect_frozen", gc.collect)
        self._capture = graphs.capture
        self._kept: WeakKeyDictionary[FixedGraph, int] = WeakKeyDictionary()
        """Graph -> the bytes that it keeps."""
        self._parts: list[int] = []
        """The bytes of the parts of the pool."""
        monkeypatch.setattr(graphs, "capture", self.capture_graph)

    def capture_graph(self, run: Callable[[], list[Tensor]], *args: Any) -> Any:
        with Operations() as operations:
            results, graph = self._capture(run, *args)
        needed = SCALE * operations.num_bytes
        if needed > max(self.parts, default=0):
            self.parts.append(needed)
        kept = OPERATION * operations.count + SCALE * sum(result.nbytes for result in results)
        self._kept[graph] = kept
        return results, graph

    @property
    def parts(self) -> list[int]:
        """The bytes of the parts of the pool, which torch frees with the last graph."""
        if not self._kept:
            self._parts.clear()
        return self._parts

    @property
    def graph_bytes(self) -> int:
        return sum(self.parts) + sum(self._kept.values())

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        free, total = super().mem_get_info(device)
        return free - self.graph_bytes, total


@pytest.fixture
def reference_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Computes with operations of torch, which `Operations` sees. Like on a GPU, those of adapters
    are also computed for steps whose tokens have none; here they are most of a step."""

    def add(self: ReferenceLora, x: Tensor, y: Tensor, tokens: LoraTokens) -> None:
        for _ in range(200):
            y.add_(0.0)

    monkeypatch.setattr(ReferenceLora, "add", add)
    monkeypatch.setitem(backends.BACKENDS, "cpu", ("reference",))
    backends.get.cache_clear()
    yield
    backends.get.cache_clear()


def with_adapters(folder: Path) -> dict[str, Any]:
    return {"lora": {"enabled": True, "max_adapters": 2}}


def with_draft_model(folder: Path) -> dict[str, Any]:
    drafts = {"method": "model", "model": {"path": str(folder)}, "max_step_tokens": 20}
    return {"drafts": drafts}


@contextmanager
def loaded_worker(folder: Path, rows: int, settings: dict[str, Any]) -> Iterator[Worker]:
    """Yields a worker that has weights and groups, but no KV cache."""
    tiny_models.make(folder, "llama", vocab_size=8000)
    worker = Worker(
        load(
            {
                "model": {"path": str(folder), "device": "cpu", "cpu_threads": 1},
                "scheduler": {"max_rows": rows, "max_tokens_per_step": 96},
                **settings,
            }
        )
    )
    try:
        worker.load()
        worker.regroup(GroupPlan(1))
        yield worker
    finally:
        worker.shutdown()


def largest_steps(worker: Worker) -> LargestSteps:
    assert worker._shape is not None
    return LargestSteps.of(worker.config, worker._built_model, worker._shape)


@pytest.mark.usefixtures("reference_only")
@pytest.mark.parametrize("settings", [lambda _folder: {}, with_adapters, with_draft_model])
@pytest.mark.parametrize("rows", [3, 40])
def test_the_estimate_holds_all_captures_and_little_more(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fixed_graphs: FixedGraphs,
    rows: int,
    settings: Callable[[Path], dict[str, Any]],
) -> None:
    gpu = GraphGpu(monkeypatch, fixed_graphs)
    with loaded_worker(tmp_path, rows, settings(tmp_path)) as worker:
        steps = largest_steps(worker)
        use = GpuMemory(torch.device("cuda", 0), 1.0).measure(lambda: worker.profile(steps))
        assert gpu.graph_bytes == 0
        worker._bind_caches(1)
        runner = worker._start_runner(steps.max_model_len)
        for captures in runner.captures:
            for capture in captures:
                capture()
        truth = gpu.graph_bytes
    assert truth <= use.graph_bytes <= 1.1 * truth


@pytest.mark.usefixtures("reference_only")
@pytest.mark.parametrize("settings", [lambda _folder: {}, with_draft_model])
@pytest.mark.parametrize("at_start", [True, False])
def test_the_order_of_captures_does_not_matter_for_their_memory(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fixed_graphs: FixedGraphs,
    settings: Callable[[Path], dict[str, Any]],
    at_start: bool,
) -> None:
    """The captures of a model share one part of the pool, even if its steps become larger one by
    one, for example after a repair."""
    gpu = GraphGpu(monkeypatch, fixed_graphs)
    with loaded_worker(tmp_path, 40, settings(tmp_path)) as worker:
        steps = largest_steps(worker)
        worker._bind_caches(PROFILE_BLOCKS)
        runner = worker._start_runner(steps.max_model_len)
        if at_start:
            runner.capture_steps(lambda _done, _total: None)
        for number, rows in enumerate((1, 2, 9, 20, 40)):
            runner.execute_model(steps._plan(number, [_Row(0, 1)] * rows))
        assert len(fixed_graphs.captured) > 5
        assert len(gpu.parts) <= 1 + ("drafts" in settings(tmp_path))
