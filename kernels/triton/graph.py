"""CUDA graphs. All graphs of a device share one memory pool, so they must not run at the same
time. Torch frees a pool with the last of its graphs, and then the pool cannot be used again."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from swell.kernels.backends import BackendUnavailable
from swell.kernels.graph import NotCapturableError, Probe, Traits
from swell.kernels.host.host_reads import RefuseHostReads

if not torch.cuda.is_available():
    raise BackendUnavailable("CUDA graphs need a GPU")

TRAITS = Traits(has_fixed_sizes=True, accepts_torch=True, is_asynchronous=True)


class CudaGraph:
    computes_torch = False

    def __init__(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        self._graph = graph
        self.pool = pool
        """The handle of its memory pool."""
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
    run: Callable[[], list[Tensor]], sizes: tuple[int, ...], probe: Probe | None
) -> tuple[list[Tensor], CudaGraph]:
    """See `swell.kernels.graph.capture`. The function is called twice: the first call compiles
    kernels and allocates what libraries keep, which a capture must not contain."""
    current, stream = torch.cuda.current_stream(), _stream(torch.cuda.current_device())
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        with RefuseHostReads():  # type: ignore[no-untyped-call]
            run()
        results, graph = _capture(run)
    current.wait_stream(stream)
    return results, graph


def rounding_like_replays() -> contextlib.AbstractContextManager[None]:
    """See `swell.kernels.graph.rounding_like_replays`: a graph repeats torch's own kernels."""
    return contextlib.nullcontext()


def _capture(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], CudaGraph]:
    """Captures on the current stream. `torch.cuda.graph` is not used, because it collects garbage
    and empties the allocator's cache each time."""
    graph = torch.cuda.CUDAGraph()
    # Other threads, for example those that copy results, may use the device meanwhile.
    device = torch.cuda.current_device()
    others = tuple(_graphs[device])
    pool = others[0].pool if others else torch.cuda.graph_pool_handle()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        results = run()
    except RuntimeError as error:
        with contextlib.suppress(RuntimeError):  # the capture is invalid and says so again
            graph.capture_end()
        with contextlib.suppress(RuntimeError):  # done already, unless the line above has failed
            torch._C._cuda_endAllocateToPool(device, pool)
        raise NotCapturableError(f"a CUDA graph cannot repeat the step: {error}") from error
    graph.capture_end()
    captured = CudaGraph(graph, pool)
    _graphs[device].add(captured)
    return results, captured


@cache
def _stream(device: int) -> torch.cuda.Stream:
    """Returns the stream on which all graphs of a device are captured: cuBLAS keeps memory for each
    stream, and torch uses the freed memory of a stream only for tensors of the same stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


_graphs: defaultdict[int, WeakSet[CudaGraph]] = defaultdict(WeakSet)
"""Device -> its graphs."""
