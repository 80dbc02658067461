"""CUDA graphs. All graphs of a device share one memory pool, so they must not run at the same
time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from swell.kernels.backends import BackendUnavailable
from swell.kernels.graph import NotCapturableError, Traits
from swell.kernels.host_reads import RefuseHostReads

if not torch.cuda.is_available():
    raise BackendUnavailable("CUDA graphs need a GPU")

TRAITS = Traits(has_fixed_sizes=True, accepts_torch=True, is_asynchronous=True)


class CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph
        self._replays = 0

    def replay(self, *sizes: int) -> None:
        """See `swell.kernels.graph.Graph.replay`."""
        self._graph.replay()
        self._replays += 1

    @property
    def progress(self) -> int:
        """The number of replays."""
        return self._replays


def capture(
    run: Callable[[], list[Tensor]], sizes: tuple[int, ...]
) -> tuple[list[Tensor], CudaGraph]:
    """See `swell.kernels.graph.capture`. The function is called twice: the first call compiles
    kernels and allocates what libraries keep, which a capture must not contain."""
    current = torch.cuda.current_stream()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        with RefuseHostReads():  # type: ignore[no-untyped-call]
            run()
        results, graph = _capture(run)
    current.wait_stream(stream)
    return results, CudaGraph(graph)


def _capture(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], torch.cuda.CUDAGraph]:
    """Captures on the current stream. `torch.cuda.graph` is not used, because it collects garbage
    and empties the allocator's cache each time."""
    graph = torch.cuda.CUDAGraph()
    # Other threads, for example those that copy results, may use the device meanwhile.
    pool = _pool(torch.cuda.current_device())
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        results = run()
    except RuntimeError as error:
        with contextlib.suppress(RuntimeError):  # the capture is invalid and says so again
            graph.capture_end()
        raise NotCapturableError(f"a CUDA graph cannot repeat the step: {error}") from error
    graph.capture_end()
    return results, graph


@cache
def _pool(device: int) -> Any:
    """Returns the handle of the memory pool of a device."""
    return torch.cuda.graph_pool_handle()
