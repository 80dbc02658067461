"""The memory of all captured steps, from captures of a real model on a card that is simulated.

The graphs of the card share one pool of memory, as those of `kernels/triton/graph.py` do: a capture
enlarges it only if it needs more than those before. Each graph also keeps its results.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor

from swell.configs.schema import load
from swell.kernels import backends
from swell.kernels.host.dispatch_mode import DispatchMode
from swell.worker.memory import gpu_memory
from swell.worker.memory.gpu_memory import GpuMemory
from swell.worker.memory.profile_run import LargestSteps
from swell.worker.wire import GroupPlan
from swell.worker.worker import Worker
from tests.worker import tiny_models
from tests.worker.fixed_graphs import FixedGraph, FixedGraphs
from tests.worker.memory.test_gpu_memory import GIB, FakeGpu

GRAPH = 1 << 16
"""Bytes of the operations of one graph."""
SCALE = 1 << 8
"""The bytes of the card for one byte of a tensor, so that tensors are larger than `GRAPH`."""


class LargestTensor(DispatchMode):
    """Notes the largest tensor that an operation computes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
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
        self._graphs: WeakKeyDictionary[FixedGraph, tuple[int, int]] = WeakKeyDictionary()
        """Graph -> the bytes that it needs in the pool, and those that it keeps."""
        monkeypatch.setattr(graphs, "capture", self.capture_graph)

    def capture_graph(self, run: Callable[[], list[Tensor]], sizes: tuple[int, ...]) -> Any:
        with LargestTensor() as largest:
            results, graph = self._capture(run, sizes)
        kept = GRAPH + SCALE * sum(result.nbytes for result in results)
        self._graphs[graph] = SCALE * largest.num_bytes, kept
        return results, graph

    @property
    def graph_bytes(self) -> int:
        pool = max((pool for pool, _kept in self._graphs.values()), default=0)
        return pool + sum(kept for _pool, kept in self._graphs.values())

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        free, total = super().mem_get_info(device)
        return free - self.graph_bytes, total


@pytest.fixture
def reference_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Computes with operations of torch, whose results `LargestTensor` sees."""
    monkeypatch.setitem(backends.BACKENDS, "cpu", ("reference",))
    backends.get.cache_clear()
    yield
    backends.get.cache_clear()


def with_draft_model(folder: Path) -> dict[str, Any]:
    return {"method": "model", "model": {"path": str(folder)}, "max_step_tokens": 20}


@pytest.mark.usefixtures("reference_only")
@pytest.mark.parametrize("drafts", [None, with_draft_model])
@pytest.mark.parametrize("rows", [3, 40])
def test_the_estimate_holds_all_captures_and_little_more(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fixed_graphs: FixedGraphs,
    rows: int,
    drafts: Callable[[Path], dict[str, Any]] | None,
) -> None:
    tiny_models.make(tmp_path, "llama", vocab_size=8000)
    config = load(
        {
            "model": {"path": str(tmp_path), "device": "cpu", "cpu_threads": 1},
            "scheduler": {"max_rows": rows, "max_tokens_per_step": 96},
            "drafts": drafts(tmp_path) if drafts else {},
        }
    )
    gpu = GraphGpu(monkeypatch, fixed_graphs)
    worker = Worker(config)
    try:
        worker.load()
        worker.regroup(GroupPlan(1))
        assert worker._shape is not None
        steps = LargestSteps.of(config, worker._built_model, worker._shape)
        use = GpuMemory(torch.device("cuda", 0), 1.0).measure(lambda: worker.profile(steps))
        assert gpu.graph_bytes == 0
        worker._bind_caches(1)
        runner = worker._start_runner(steps.max_model_len)
        for captures in runner.captures:
            for capture in captures:
                capture()
        truth = gpu.graph_bytes
    finally:
        worker.shutdown()
    assert truth <= use.graph_bytes <= 1.1 * truth
