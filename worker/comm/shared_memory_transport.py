"""The transport between processes of one machine, on CPUs: shared memory.

Without a network, a step of tensor parallel workers spends little time in its sums: there are two
in each layer. Messages from one rank to another are left to gloo.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from swell.kernels.backends import BackendUnavailable
from swell.worker.comm.transport import (
    CONNECT_S,
    POLL_S,
    Formation,
    Transport,
    check_members,
)

if TYPE_CHECKING:
    from swell.kernels.cpu.exchange import Exchange


class _Backend:
    """The collective operations of a torch backend. An operation has finished, or has failed, when
    it returns."""

    def __init__(self, exchange: Exchange, rank: int, size: int) -> None:
        self._exchange, self._rank, self._size = exchange, rank, size

    def allreduce(self, tensors: list[Tensor], _options: Any = None) -> None:
        (t,) = tensors
        if self._exchange.all_reduce(t):
            self._check()
            return
        parts = self._gather(t)
        total = parts[0].float() if t.is_floating_point() else parts[0]
        for part in parts[1:]:
            total += part
        t.copy_(total)

    def _allgather_base(self, out: Tensor, t: Tensor, _options: Any = None) -> None:
        self._exchange.all_gather(t, out, rows=1)
        self._check()

    def allgather_rows(self, out: Tensor, t: Tensor) -> None:
        """t [rows, n] -> out [rows, size * n], both contiguous"""
        self._exchange.all_gather(t, out, rows=len(t))
        self._check()

    def _reduce_scatter_base(self, out: Tensor, t: Tensor, _options: Any = None) -> None:
        total = t.clone()
        self.allreduce([total])
        out.copy_(total[self._rank * len(out) : (self._rank + 1) * len(out)])

    def broadcast(self, tensors: list[Tensor], options: Any) -> None:
        (t,) = tensors
        t.copy_(self._gather(t)[options.rootRank])

    def _gather(self, t: Tensor) -> Tensor:
        """Returns the tensors of all ranks, [size, ...]."""
        parts = t.new_empty(self._size, *t.shape)
        self._allgather_base(parts, t)
        return parts

    def _check(self) -> None:
        if failure := self._exchange.failure:
            raise RuntimeError(failure)


class SharedMemoryTransport(Transport):
    """The transport between processes of one machine. An operation fails if a rank aborts or leaves
    the group, if the process of a rank has ended, or after the time limit."""

    uses_kernels = True

    def __init__(self, exchange: Exchange, rank: int, processes: list[int]) -> None:
        """`processes`: see `Exchange`; they are closed with the transport."""
        super().__init__(_Backend(exchange, rank, len(processes)))
        self._exchange, self._processes = exchange, processes

    @property
    def aborted(self) -> bool:
        return self._aborted or bool(self._exchange.failure)

    @property
    def reason(self) -> str:
        return self._exchange.failure

    def wait(self, work: Any) -> None:
        """Does nothing: the operation has finished."""

    def abort(self) -> None:
        self._aborted = True
        self._exchange.abort()

    def close(self) -> None:
        self.abort()
        _close(self._processes)


def connect_shared_memory(formation: Formation) -> Transport | None:
    """Connects the ranks of a group. Returns None at every rank if they are not on one machine, or
    if one of them cannot use shared memory. Raises `PeersAbsent` and `ForeignMember`."""
    rank, size = formation.rank, formation.size
    with _offered(size) as own:
        texts = formation.exchange("place", "" if own is None else " ".join(map(str, own)))
        places = [_Place.parse(text) for text in texts if text]
        if len(places) < size or len({place.machine for place in places}) > 1:
            return None
        region, processes = _mapped(places[0], size), _watched(places)
        try:
            has_opened = region is not None and len(processes) == size
            opened = formation.exchange("opened", "yes" if has_opened else "no")
        except BaseException:
            _close(processes)
            raise
    if region is None or "no" in opened:
        _close(processes)
        return None
    from swell.kernels.cpu.exchange import Exchange

    exchange = Exchange(region, rank, processes, min(formation.timeout_s, CONNECT_S))
    transport = SharedMemoryTransport(exchange, rank, processes)
    try:
        with _aborted_by(formation.aborted, transport):
            check_members(transport, formation)
    except BaseException:
        transport.close()
        raise
    exchange.set_timeout(formation.timeout_s)
    return transport


class _Place(NamedTuple):
    """The process of a rank."""

    machine: str
    pid: int
    descriptor: int
    """The file that the process offers for the shared memory; rank 0's is used."""

    @classmethod
    def parse(cls, text: str) -> _Place:
        machine, pid, descriptor = text.split()
        return cls(machine, int(pid), int(descriptor))


def _watched(places: Sequence[_Place]) -> list[int]:
    """Returns a descriptor of each process; fewer if this is not possible."""
    found: list[int] = []
    with suppress(OSError):
        for place in places:
            found.append(os.pidfd_open(place.pid))
    return found


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


@contextmanager
def _aborted_by(event: threading.Event, transport: Transport) -> Iterator[None]:
    """In this context the transport is aborted when the event is set: the group does not have it
    yet."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_S):
            if event.is_set():
                transport.abort()
                return

    thread = threading.Thread(target=watch, name="forming", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _machine() -> str:
    """Returns a name that is equal for processes that can open each other's files."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}/{os.geteuid()}"


@contextmanager
def _offered(size: int) -> Iterator[_Place | None]:
    """Yields the place of this rank, whose file is open in this context; None if it cannot use
    shared memory."""
    try:
        from swell.kernels.cpu.exchange import region_bytes

        machine = _machine()
        descriptor = os.memfd_create("swell-exchange", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (BackendUnavailable, OSError):
        yield None
        return
    try:
        os.ftruncate(descriptor, region_bytes(size))
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        yield _Place(machine, os.getpid(), descriptor)
    finally:
        os.close(descriptor)


def _mapped(place: _Place, size: int) -> mmap.mmap | None:
    """Maps rank 0's file; None if this is not possible."""
    from swell.kernels.cpu.exchange import region_bytes

    with suppress(OSError, ValueError):
        descriptor = os.open(f"/proc/{place.pid}/fd/{place.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(descriptor, region_bytes(size))
        finally:
            os.close(descriptor)
    return None
