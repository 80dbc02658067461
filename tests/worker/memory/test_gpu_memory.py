"""The size of a KV cache on a GPU, from numbers that a fake GPU reports."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swell.worker.memory import gpu_memory
from swell.worker.memory.gpu_memory import (
    GpuMemory,
    MemoryUse,
    estimate_graph_bytes,
    limit_memory,
)

GIB = 1024**3
CARD = 80 * GIB
GRAPH = 1 << 20
"""Bytes of the operations of one graph."""


@st.composite
def uses(draw: st.DrawFn) -> MemoryUse:
    total = draw(st.integers(8 * GIB, 200 * GIB))
    share = draw(st.sampled_from([0.25, 0.5, 1.0]))
    weights = draw(st.integers(0, total))
    other = draw(st.integers(0, total - weights))
    """Groups, the CUDA context, and other processes."""
    outside = draw(st.integers(0, min(other, int(total * share))))
    return MemoryUse(
        limit_bytes=int(total * share),
        outside_bytes=outside,
        free_bytes=total - weights - other,
        reserved_bytes=weights,
        peak_bytes=weights + draw(st.integers(0, total)),
        graph_bytes=draw(st.integers(0, 4 * GIB)),
    )


@given(uses())
def test_a_cache_leaves_room_for_the_largest_step_and_little_more(use: MemoryUse) -> None:
    """With the cache, the largest step and all captures fit; and if there is a cache, at most 3 %
    of the memory stays unused."""
    usable = min(use.free_bytes + use.reserved_bytes, use.limit_bytes - use.outside_bytes)
    needed = use.peak_bytes + use.graph_bytes
    assert use.cache_bytes >= 0
    if use.cache_bytes:
        assert needed + use.cache_bytes <= usable
        assert usable - needed - use.cache_bytes <= 0.03 * use.limit_bytes
    else:
        assert needed + gpu_memory.SPARE * use.limit_bytes >= usable - 1


@given(uses(), st.integers(1, GIB))
def test_a_larger_step_never_leaves_more_for_the_cache(use: MemoryUse, more: int) -> None:
    for field in ("peak_bytes", "graph_bytes"):
        larger = use._replace(**{field: getattr(use, field) + more})
        assert larger.cache_bytes == max(0, use.cache_bytes - more) or not use.cache_bytes


@given(
    st.integers(0, GIB), st.integers(0, 1 << 28), st.integers(0, 1 << 24), st.integers(1, 9),
    st.integers(0, 200),
)  # fmt: skip
def test_the_memory_of_all_captures_follows_from_the_first_ones(
    before: int, pool: int, each: int, measured: int, others: int
) -> None:
    """The first capture makes the pool, and each further one adds the same amount."""
    used = [before, *(before + pool + each * at for at in range(measured))]
    estimate = estimate_graph_bytes(used, measured + others)
    truth = pool + each * (measured + others - 1)
    assert estimate == truth if measured > 1 else estimate == pool * (1 + others)
    assert estimate_graph_bytes([before], 0) == 0, "steps are not captured"


class FakeGpu:
    """A card; the functions of torch report its memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, weights: int, other: int) -> None:
        self.allocated, self.other = weights, other
        self.cached = 0
        """Bytes that torch keeps for later tensors."""
        self.peak = 0
        self.is_synchronized = True
        self.limit = CARD
        """The most that torch may allocate for this process."""
        monkeypatch.setattr(gpu_memory, "collect_frozen", lambda: None)  # takes seconds
        for name in ("mem_get_info", "memory_reserved", "max_memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        properties = SimpleNamespace(total_memory=CARD)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: properties)
        monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", self.set_fraction)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self.reset_peak)

    def mem_get_info(self, _device: torch.device) -> tuple[int, int]:
        return CARD - self.other - self.memory_reserved(_device), CARD

    def memory_reserved(self, _device: torch.device) -> int:
        return self.allocated + self.cached

    def max_memory_reserved(self, _device: torch.device) -> int:
        assert self.is_synchronized
        return self.peak

    def synchronize(self, _device: torch.device) -> None:
        self.is_synchronized = True

    def empty_cache(self) -> None:
        self.cached = 0

    def reset_peak(self, _device: torch.device) -> None:
        self.peak = self.allocated + self.cached

    def compute(self, num_bytes: int) -> None:
        """Plays a step with this many bytes of intermediate results."""
        self.is_synchronized = False
        self.cached = max(self.cached, num_bytes)
        self.peak = max(self.peak, self.allocated + self.cached)
        if self.peak + self.other > CARD or self.peak > self.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate it.\nAll of it.")

    def capture(self, kept_bytes: int) -> None:
        """Torch allocates the results of a graph, and the driver its operations."""
        self.compute(GIB)
        self.allocated += kept_bytes - GRAPH
        self.other += GRAPH

    def set_fraction(self, fraction: float, _device: torch.device) -> None:
        self.limit = int(CARD * fraction)


def run(gpu: FakeGpu, step: int, captures: int) -> Iterator[int | None]:
    tables = GIB // 2
    gpu.allocated += tables
    gpu.compute(step)
    yield captures
    for at in range(min(4, captures)):
        gpu.capture(GIB // 4 if at == 0 else GIB // 64)
        yield None
    if captures:
        gpu.other -= 4 * GRAPH
        gpu.allocated -= GIB // 4 + 3 * GIB // 64 - 4 * GRAPH
    gpu.allocated -= tables


@pytest.mark.parametrize("captures", [0, 94])
def test_a_profile_run_is_measured(monkeypatch: pytest.MonkeyPatch, captures: int) -> None:
    gpu = FakeGpu(monkeypatch, weights=16 * GIB, other=3 * GIB)
    gpu.cached = 7 * GIB  # of the loading of weights
    memory = GpuMemory(torch.device("cuda", 0), 1.0)
    use = memory.measure(lambda: run(gpu, 5 * GIB, captures))
    graphs = GIB // 4 + 93 * GIB // 64 if captures else 0
    peak = (16 + 5) * GIB + GIB // 2
    assert use == MemoryUse(CARD, 3 * GIB, CARD - 19 * GIB, 16 * GIB, peak, graphs)
    gpu.allocated += use.cache_bytes
    gpu.other += use.graph_bytes
    gpu.allocated += GIB // 2
    gpu.compute(5 * GIB)  # raises if memory is exceeded
    free, total = gpu.mem_get_info(torch.device("cuda", 0))
    assert 0 < free <= 0.03 * total


@pytest.mark.parametrize(
    ("captures", "share", "loads"), [(0, 0.5, 0), (94, 0.25, 5 * GIB), (94, 0.5, -9 * GIB)]
)
def test_a_part_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, captures: int, share: float, loads: int
) -> None:
    """Workers that share a GPU take memory, or give it back, at any time. All of it fits, with the
    contexts of all of them, and little of each part stays unused."""
    context, others = GIB // 2, 10 * GIB
    gpu = FakeGpu(monkeypatch, weights=4 * GIB, other=context + others)

    def run_on_shared_gpu() -> Iterator[int | None]:
        for event in run(gpu, GIB, captures):
            yield event
            gpu.other += loads // 5

    memory = GpuMemory(torch.device("cuda", 0), share)
    use = memory.measure(run_on_shared_gpu)
    graphs = GIB // 4 + 93 * GIB // 64 if captures else 0
    needed = context + 4 * GIB + GIB // 2 + GIB + graphs
    left = CARD * share - needed - use.cache_bytes
    assert 0 < left <= 0.06 * CARD * share


def test_torch_allocates_no_more_than_a_part_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is that of other workers, which may allocate it later."""
    gpu = FakeGpu(monkeypatch, weights=4 * GIB, other=GIB)
    limit_memory(torch.device("cuda", 0), 1.0)
    assert gpu.limit == CARD
    limit_memory(torch.device("cuda", 0), 0.25)
    assert CARD // 4 - GIB < gpu.limit < CARD // 4
    memory = GpuMemory(torch.device("cuda", 0), 0.25)
    with pytest.raises(ValueError, match="does not fit"):
        memory.measure(lambda: run(gpu, 20 * GIB, 0))


def test_a_step_that_does_not_fit_is_an_error_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = FakeGpu(monkeypatch, weights=70 * GIB, other=GIB)
    with pytest.raises(ValueError, match=r"cuda:0: .*allocate it\.; lower .*max_tokens_per_step"):
        GpuMemory(torch.device("cuda", 0), 1.0).measure(lambda: run(gpu, 20 * GIB, 0))
