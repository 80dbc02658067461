"""CUDA graphs without a GPU: what this backend calls of torch, which is replaced."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from swell.kernels.graph import NotCapturableError

pytestmark = pytest.mark.slow

NAME = "swell.kernels.triton.graph"


class StubCuda:
    """The state of torch that a capture changes."""

    def __init__(self) -> None:
        self.pools = 0
        self.recording: set[int] = set()
        """Pools to which torch allocates: those of captures that have begun."""
        self.captured_on: list[object] = []
        """The stream of each capture."""
        self.current: object = StubStream(0)
        self.is_invalid = False

    def new_pool(self) -> int:
        self.pools += 1
        return self.pools

    def end_recording(self, device: int, pool: int) -> None:
        if pool not in self.recording:
            raise RuntimeError("not currently recording to this pool")
        self.recording.remove(pool)

    @contextlib.contextmanager
    def on(self, stream: object) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class StubStream:
    def __init__(self, device: int) -> None:
        self.device = device

    def wait_stream(self, other: object) -> None:
        pass


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StubCuda:
    stub = StubCuda()

    class StubGraph:
        def capture_begin(self, pool: int, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local"
            if pool in stub.recording:
                raise RuntimeError("already recording to this pool")
            stub.recording.add(pool)
            stub.captured_on.append(stub.current)
            self._pool = pool

        def capture_end(self) -> None:
            if stub.is_invalid:
                raise RuntimeError("the capture is invalid")
            stub.recording.remove(self._pool)

    for name, value in {
        "is_available": lambda: True,
        "get_device_capability": lambda: (9, 0),
        "current_device": lambda: 0,
        "current_stream": lambda: stub.current,
        "graph_pool_handle": stub.new_pool,
        "stream": stub.on,
        "CUDAGraph": StubGraph,
        "Stream": StubStream,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", stub.end_recording, raising=False)
    return stub


@pytest.fixture
def graph(cuda: StubCuda) -> Iterator[ModuleType]:
    sys.modules.pop(NAME, None)
    yield importlib.import_module(NAME)
    del sys.modules[NAME]


def captured(graph: ModuleType) -> object:
    return graph.capture(lambda: [torch.ones(2)], (2,), None)


def test_all_graphs_share_a_pool_and_a_stream(cuda: StubCuda, graph: ModuleType) -> None:
    kept = [captured(graph) for _ in range(3)]
    assert len(kept) == 3 and cuda.pools == 1 and not cuda.recording
    assert len(set(cuda.captured_on)) == 1


def test_a_pool_is_not_used_after_its_last_graph(cuda: StubCuda, graph: ModuleType) -> None:
    for _ in range(2):
        captured(graph)
    assert cuda.pools == 2


@pytest.mark.parametrize("is_invalid", [True, False], ids=["the end fails too", "it ends"])
def test_a_capture_that_fails_does_not_prevent_others(
    cuda: StubCuda, graph: ModuleType, is_invalid: bool
) -> None:
    calls = []

    def fail_in_capture() -> list[torch.Tensor]:
        calls.append(cuda.recording.copy())
        if cuda.recording:
            raise torch.OutOfMemoryError("out of memory")
        return []

    kept = captured(graph)
    cuda.is_invalid = is_invalid
    with pytest.raises(NotCapturableError, match="out of memory"):
        graph.capture(fail_in_capture, (2,), None)
    cuda.is_invalid = False
    assert calls == [set(), {1}] and not cuda.recording
    assert kept and captured(graph) and cuda.pools == 1
