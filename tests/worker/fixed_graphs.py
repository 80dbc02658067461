"""Graphs that work like CUDA graphs, on a CPU: they compute exactly the sizes of their capture,
share their memory, contain the operations of groups, and their results are read late."""

from __future__ import annotations

import gc
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

import pytest
from torch import Tensor

from swell.engine.executor.inline import InlineExecutor
from swell.kernels import graph
from swell.kernels.graph import NotCapturableError, Probe, Traits
from swell.kernels.host.host_reads import RefuseHostReads
from swell.worker import runner
from swell.worker.comm import connect
from swell.worker.comm.groups import ProcessGroup
from swell.worker.comm.transport import Transport
from swell.worker.step import captured_forward


class FixedGraphs:
    """The module `graph` of a backend. Each thread, on which one worker runs, has a device of its
    own."""

    TRAITS = Traits(has_fixed_sizes=True, accepts_torch=True, is_asynchronous=True)

    def __init__(self) -> None:
        self._graphs: defaultdict[int, WeakSet[FixedGraph]] = defaultdict(WeakSet)
        """Thread -> its graphs. A set that another thread changes cannot be read."""
        self.captured: list[tuple[int, ...]] = []
        """The sizes of all captures."""
        self.replays: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        """Thread -> the sizes of its replays, in order."""
        self.operations: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
        """Thread -> the groups and names of the operations that it has computed, in order."""
        self.refusing: set[int] = set()
        """Threads whose captures fail."""
        self._used = threading.local()
        """`transports`: those of the operations that this thread's last capture contains, and of
        later ones."""

    def capture(
        self, run: Callable[[], list[Tensor]], sizes: tuple[int, ...], probe: Probe | None
    ) -> tuple[list[Tensor], FixedGraph]:
        """Computes the function once, like the first of the two calls for a CUDA graph: the second
        one, which is captured, computes nothing."""
        transports = self._used.transports = set[Transport]()
        with RefuseHostReads():  # type: ignore[no-untyped-call]
            results = [result.clone() for result in run()]
        if threading.get_ident() in self.refusing:
            raise NotCapturableError("this thread captures nothing")
        self.captured.append(sizes)
        made = FixedGraph(self, run, results, sizes, transports)
        self._graphs[made.thread].add(made)
        return results, made

    def rounding_like_replays(self) -> AbstractContextManager[None]:
        return nullcontext()

    def note(self, group: ProcessGroup, operation: str) -> None:
        """Notes an operation of a group."""
        if group._transport is not None:
            getattr(self._used, "transports", set[Transport]()).add(group._transport)
        self.operations[threading.get_ident()].append((group.name, operation))

    def frees_those_of(self, transport: Transport) -> bool:
        """Whether this thread's graphs with operations of the transport have been forgotten."""
        for _ in range(5):  # a collection does nothing while another thread collects
            gc.collect()
            if not any(transport in graph.transports for graph in self.of_thread()):
                return True
            time.sleep(0.02)
        return False

    @property
    def graphs(self) -> list[FixedGraph]:
        """The graphs of all threads, while no thread captures."""
        return [graph for of_thread in self._graphs.values() for graph in of_thread]

    def of_thread(self) -> list[FixedGraph]:
        return list(self._graphs[threading.get_ident()])


class FixedGraph:
    computes_torch = False

    def __init__(
        self,
        graphs: FixedGraphs,
        run: Callable[[], list[Tensor]],
        results: list[Tensor],
        sizes: tuple[int, ...],
        transports: set[Transport],
    ) -> None:
        self._graphs, self._run, self._results, self._sizes = graphs, run, results, sizes
        self.thread, self.transports = threading.get_ident(), transports
        self.progress = 0

    def replay(self, *sizes: int) -> None:
        assert all(size <= room for size, room in zip(sizes, self._sizes, strict=True))
        for other in self._graphs.of_thread():
            for result in other._results:
                result.fill_(7)  # the memory of one graph's results is reused by the others
        for result, computed in zip(self._results, self._run(), strict=True):
            result.copy_(computed)
        self.progress += 1
        self._graphs.replays[self.thread].append(self._sizes)


class LateOutput(runner.ReadyOutput):
    """A result that is read when the engine asks for it, after the next steps have begun."""

    def __init__(self, output: Any, sampled: Any, mesh: Any, stream: Any) -> None:
        self._late, self._sampled = output, sampled

    def get_output(self) -> Any:
        return self._sampled.fill(self._late)


@pytest.fixture
def fixed_graphs(monkeypatch: pytest.MonkeyPatch) -> FixedGraphs:
    """Lets all workers use these graphs."""
    made = FixedGraphs()
    monkeypatch.setattr(connect, "connect_shared_memory", lambda formation: None)
    monkeypatch.setattr(graph, "_backend", lambda device: made)
    monkeypatch.setattr(graph, "can_capture", lambda device: True)
    monkeypatch.setattr(captured_forward, "can_capture", lambda device: True)
    monkeypatch.setattr(InlineExecutor, "overlaps", property(lambda self: True))
    monkeypatch.setattr(runner, "CopyingOutput", LateOutput)
    monkeypatch.setattr(captured_forward, "traits", lambda device: made.TRAITS)
    start, run = runner.ModelRunner.__init__, ProcessGroup._run

    def start_late(self: Any, args: Any) -> None:
        start(self, args)
        self._copy_stream = object()

    def note_and_run(self: ProcessGroup, operation: str, *args: Any) -> None:
        made.note(self, operation)
        run(self, operation, *args)

    monkeypatch.setattr(runner.ModelRunner, "__init__", start_late)
    monkeypatch.setattr(ProcessGroup, "_run", note_and_run)
    return made
