"""A ProcessGroupNCCL without GPUs, for ranks that are threads of one process.

The stub has the properties of torch's class that Swell must respect:

- an operation is queued on a stream, which computes it later: a call and its `wait()` return at
  once, only `wait(timeout)` waits on the host;
- the first operation blocks the host until every rank has connected;
- a peer that does not take part raises no error: the stream waits until `abort`;
- an aborted operation ends without an error, and its tensors hold garbage;
- `abort` returns when the kernels of all communicators of the device have ended.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

GARBAGE = 99
LIMIT_S = 5.0
"""How long the stub waits for something that correct code does at once."""


@dataclass
class Call:
    """A call of the stub, as the tests see it."""

    name: str
    rank: int
    thread: int
    options: Any = None
    environment: dict[str, str] = field(default_factory=dict)


class Room:
    """The ranks that meet in one communicator."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.connected: set[int] = set()
        self.given: dict[Any, dict[int, torch.Tensor]] = defaultdict(dict)
        """Operation -> the tensor of each rank that has reached it."""


class StubWork:
    def __init__(self) -> None:
        self.done = threading.Event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None and not self.done.wait(timeout.total_seconds()):
            raise RuntimeError("the operation timed out")
        return True


class StubEvent:
    """A CUDA event of the thread that records it."""

    def __init__(self, nccl: StubNccl) -> None:
        self._nccl = nccl
        self._works: list[StubWork] = []

    def record(self, _stream: Any) -> None:
        mine = threading.get_ident()
        self._works = [w for b in self._nccl.backends if b.owner == mine for w in b.works]

    def query(self) -> bool:
        return all(work.done.is_set() for work in self._works)


class StubNccl:
    """All communicators of one test, and the log of their calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.backends: list[StubBackend] = []
        self._lock = threading.Lock()
        self._rooms: dict[int, Room] = {}
        self.numbers = itertools.count()
        self.running = threading.Event()
        """Devices compute only while this is set."""
        self.running.set()
        self.host_waits = False
        """Whether the host waits for operations on the current stream, as if it read their results
        on this stream."""
        self.aborts_end = threading.Event()
        self.aborts_end.set()

    def room(self, number: int) -> Room:
        """Returns the room of that number, which is made for the first rank that asks."""
        with self._lock:
            return self._rooms.setdefault(number, Room())

    def named(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]

    def of_rank(self, rank: int) -> list[str]:
        return [call.name for call in self.calls if call.rank == rank]


class StubBackend:
    nccl: StubNccl

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        self.rank, self.size, self.owner = rank, size, threading.get_ident()
        self.works: list[StubWork] = []
        self.error = ErrorType.SUCCESS
        self.aborted = threading.Event()
        number = store.compare_set("stub", "", str(next(self.nccl.numbers)))
        self._room = self.nccl.room(int(number))
        self._sequence: dict[Any, int] = defaultdict(int)
        self._stream: queue.SimpleQueue[tuple[Callable[[], None], StubWork]] = queue.SimpleQueue()
        self.nccl.backends.append(self)
        self._log("make", options, dict(os.environ))
        threading.Thread(target=self._compute, daemon=True).start()

    def _log(self, name: str, options: Any = None, environment: Any = None) -> None:
        call = Call(name, self.rank, threading.get_ident(), options, environment or {})
        self.nccl.calls.append(call)

    def _compute(self) -> None:
        while not self.aborted.is_set() or not self._stream.empty():
            try:
                operation, work = self._stream.get(timeout=0.02)
            except queue.Empty:
                continue
            while not (self.nccl.running.wait(0.01) or self.aborted.is_set()):
                """The device is slow."""
            operation()
            work.done.set()

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._log("connect", device)
        with self._room.changed:
            self._room.connected.add(self.rank)
            self._room.changed.notify_all()

    def get_error(self) -> ErrorType:
        return self.error

    def abort(self) -> None:
        self._log("abort")
        self.aborted.set()
        with self._room.changed:
            self._room.changed.notify_all()
        mine = [b for b in self.nccl.backends if b.owner == self.owner]
        for work in [work for backend in mine for work in backend.works]:
            if not work.done.wait(LIMIT_S):
                raise RuntimeError("a kernel of another communicator still runs")
        self.nccl.aborts_end.wait()

    # ------------------------------------------------------------------ operations

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> StubWork | None:
        (t,) = tensors

        def finish(parts: list[torch.Tensor]) -> None:
            t.copy_(torch.stack(parts).sum(0))

        return self._collective("allreduce", t, t, finish, options)

    def _allgather_base(
        self, out: torch.Tensor, t: torch.Tensor, options: Any = None
    ) -> StubWork | None:
        assert out.is_contiguous() and out.shape == (self.size * len(t), *t.shape[1:])
        return self._collective(
            "_allgather_base", out, t, lambda parts: out.copy_(torch.cat(parts)), options
        )

    def _reduce_scatter_base(
        self, out: torch.Tensor, t: torch.Tensor, options: Any = None
    ) -> StubWork | None:
        def finish(parts: list[torch.Tensor]) -> None:
            out.copy_(torch.stack(parts).sum(0).chunk(self.size)[self.rank])

        return self._collective("_reduce_scatter_base", out, t, finish, options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> StubWork | None:
        (t,) = tensors
        return self._collective(
            "broadcast", t, t, lambda parts: t.copy_(parts[options.rootRank]), options
        )

    def send(self, tensors: list[torch.Tensor], dst: int, _tag: int) -> StubWork | None:
        (t,) = tensors
        return self._meet(("send", self.rank, dst), t, t, {self.rank, dst}, lambda _parts: None)

    def recv(self, tensors: list[torch.Tensor], src: int, _tag: int) -> StubWork | None:
        (t,) = tensors
        ranks = {src, self.rank}
        return self._meet(
            ("send", src, self.rank), t, t, ranks, lambda parts: t.copy_(parts[src > self.rank])
        )

    def _collective(self, name: str, out: Any, t: Any, finish: Any, options: Any) -> Any:
        self._log(name, options)
        work = self._meet(name, out, t, set(range(self.size)), finish)
        if options is None or options.asyncOp:
            return work
        if self.nccl.host_waits:
            work.wait(timedelta(seconds=LIMIT_S))
        return None

    def _meet(self, key: Any, out: Any, t: Any, ranks: set[int], finish: Any) -> StubWork:
        with self._room.changed:
            self._room.changed.wait_for(
                lambda: len(self._room.connected) == self.size or self.aborted.is_set()
            )
        self._sequence[key] += 1
        number = (key, self._sequence[key])

        def operation() -> None:
            with self._room.changed:
                given = self._room.given[number]
                if not self.aborted.is_set():
                    given[self.rank] = t.clone()
                    self._room.changed.notify_all()
                self._room.changed.wait_for(lambda: ranks <= given.keys() or self.aborted.is_set())
                if ranks <= given.keys():
                    finish([given[rank] for rank in sorted(ranks)])
                else:
                    out.fill_(GARBAGE)

        work = StubWork()
        self.works.append(work)
        self._stream.put((operation, work))
        return work


def install(monkeypatch: Any) -> StubNccl:
    """Replaces what torch has only on machines with GPUs. Returns the stub."""
    nccl = StubNccl()

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(blocking=None)
            self._timeout: timedelta | None = None

    backend = type("ProcessGroupNCCL", (StubBackend,), {"nccl": nccl, "Options": Options})
    monkeypatch.setattr(dist, "ProcessGroupNCCL", backend, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", lambda: StubEvent(nccl))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    return nccl
