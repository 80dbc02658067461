"""What carries a group's operations: gloo between CPUs, NCCL between GPUs.

A transport can be aborted by another thread while an operation blocks in it. NCCL has that built
in. Gloo has not: its operations end when a connection does, so the connections themselves are shut
down, which is to both ends what the death of the peer would be.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

POLL_S = 0.01
"""How often a rank that forms a group looks for its peers, and whether it was aborted."""

CONNECT_S = 20.0
"""How long peers that have all announced themselves may take to connect."""

_POLL_TIMEOUT = timedelta(seconds=0.2)
"""How long an aborted operation of gloo's may take to fail."""

_leaked_backends: list[dist.Backend] = []
"""Backends with an operation that never ends: to destroy one would wait for it."""

Address = tuple[str, int]

_listening = threading.Lock()
"""Held while a device is made, so that threads tell their listening sockets apart."""


class PeerWaiter:
    """Waits on a thread of its own; what never ends can be left to it."""

    def __init__(self) -> None:
        self._works: SimpleQueue[tuple[Any, timedelta, Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gloo-peer", daemon=True)
        self._thread.start()

    def wait(self, work: Any, timeout: timedelta) -> Future[None]:
        """Works are waited for one after the other."""
        done: Future[None] = Future()
        self._works.put((work, timeout, done))
        return done

    def leave(self) -> None:
        """The thread ends once it has nothing left to wait for, if ever."""
        self._works.put(None)

    def close(self) -> None:
        """End the thread, which has nothing left to wait for. It must not outlive the interpreter:
        the works that it drops let go of the interpreter's lock and could not take it again."""
        self.leave()
        self._thread.join()

    def _run(self) -> None:
        while (task := self._works.get()) is not None:
            work, timeout, done = task
            try:
                work.wait(timeout)
                done.set_result(None)
            except Exception as error:  # the caller must not wait for ever
                done.set_exception(error)


class Transport:
    """A backend of torch, and the way to leave it."""

    def __init__(self, backend: dist.Backend) -> None:
        self.backend = backend
        self.aborted = False

    def wait(self, work: Any) -> None:
        """Until an operation of all ranks is done. Raises `RuntimeError` if it fails."""
        work.wait()

    def wait_for_peer(self, work: Any) -> None:
        """Until a send or a receive is done. Raises `RuntimeError` if it fails."""
        work.wait()

    def abort(self) -> None:
        """Let operations under way fail, here and at the peers; from any thread."""
        self.aborted = True
        self.backend.abort()

    def close(self) -> None:
        """Leave; from the thread that uses it. What was sent still arrives."""
        self.aborted = True
        self.backend.abort()


class GlooTransport(Transport):
    """An operation that meets a connection just as it breaks may never end in gloo. So an aborted
    one is given up after a moment."""

    def __init__(self, backend: dist.Backend, members: set[Address], timeout_s: float) -> None:
        """`members`: where each rank listens for connections of this group, and no other."""
        super().__init__(backend)
        self._members = members
        self._timeout = timedelta(seconds=timeout_s)
        self._stuck = False
        self._waiter: PeerWaiter | None = None

    def wait(self, work: Any) -> None:
        self._wait(lambda: work.wait(_POLL_TIMEOUT))

    def wait_for_peer(self, work: Any) -> None:
        """gloo takes a wait for a peer that ends early for a reason to break the connection, so
        the whole wait is another thread's."""
        if self._waiter is None:
            self._waiter = PeerWaiter()
        done = self._waiter.wait(work, self._timeout)
        self._wait(lambda: done.result(_POLL_TIMEOUT.total_seconds()))

    def _wait(self, poll: Callable[[], Any]) -> None:
        while True:
            aborted = self.aborted
            try:
                poll()
                return
            except (TimeoutError, RuntimeError) as error:
                if not isinstance(error, TimeoutError) and "timed out" not in str(error):
                    raise
                if aborted:
                    self._stuck = True
                    _leaked_backends.append(self.backend)
                    raise RuntimeError("given up: the operation was aborted") from error

    def close(self) -> None:
        if self._stuck:  # to end thread and group would be to wait for the operation
            self.aborted = True
            if self._waiter is not None:
                self._waiter.leave()
            return
        if self._waiter is not None:
            self._waiter.close()
        super().close()

    def abort(self) -> None:
        self.aborted = True
        for sock in _sockets():
            try:
                if {sock.getsockname()[:2], sock.getpeername()[:2]} & self._members:
                    sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                """It listens or has ended: there is nothing to shut down."""


def form(
    device_type: str,
    store: dist.Store,
    rank: int,
    size: int,
    timeout_s: float,
    aborted: threading.Event,
) -> Transport:
    """Meet the other ranks in `store`, whose keys are this group's alone, and connect to them.

    Raises `TimeoutError` if a peer does not announce itself in time, `InterruptedError` when
    `aborted` is set meanwhile, `RuntimeError` when store or peers are gone.
    """
    start = TRANSPORTS[device_type]

    def meet(address: str) -> list[str]:
        """Tell one's own address; those of all ranks."""
        store.set(f"address{rank}", address)
        keys = [f"address{peer}" for peer in range(size)]
        deadline = time.monotonic() + timeout_s
        while not store.check(keys):
            if aborted.wait(POLL_S):
                raise InterruptedError("aborted while peers were awaited")
            if time.monotonic() > deadline:
                absent = [peer for peer in range(size) if not store.check(keys[peer : peer + 1])]
                raise TimeoutError(f"ranks {absent} of {size} did not come in {timeout_s:g} s")
        return [store.get(key).decode() for key in keys]

    return start(store, rank, size, timeout_s, meet)


def _gloo(
    store: dist.Store, rank: int, size: int, timeout_s: float, meet: Callable[[str], list[str]]
) -> Transport:
    device, host, port = _listen(_host(store))
    members = set()
    for address in meet(f"{host} {port}"):
        peer_host, _, peer_port = address.rpartition(" ")
        members.add((peer_host, int(peer_port)))
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=min(timeout_s, CONNECT_S))
    options._threads = 2
    options._devices = [device]
    backend = dist.ProcessGroupGloo(store, rank, size, options)
    backend.set_timeout(timedelta(seconds=timeout_s))
    return GlooTransport(backend, members, timeout_s)


def _nccl(
    store: dist.Store, rank: int, size: int, timeout_s: float, meet: Callable[[str], list[str]]
) -> Transport:
    meet("")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return Transport(dist.ProcessGroupNCCL(store, rank, size, options))


TRANSPORTS: dict[str, Callable[..., Transport]] = {"cpu": _gloo, "cuda": _nccl}
"""Device type -> what forms a group there."""


def _listen(host: str | None) -> tuple[dist.ProcessGroupGloo.Device, str, int]:
    """A device of gloo's, and the address at which it listens."""
    make = dist.ProcessGroupGloo
    with _listening:
        while True:
            before = set(_listeners())
            device = make.create_device(hostname=host) if host else make.create_default_device()
            found = set(_listeners()) - before
            if len(found) == 1:  # else another part of the process began to listen meanwhile
                return device, *found.pop()


def _host(store: dist.Store) -> str | None:
    """The address of this machine that peers can reach, where the store tells it.

    Peers that meet in one process or over loopback need no name that resolves.
    """
    if isinstance(store, dist.HashStore | dist.FileStore):
        return "127.0.0.1"
    if isinstance(store, dist.PrefixStore):
        return _host(store.underlying_store)
    if isinstance(store, dist.TCPStore) and store.host in ("localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    return None


def _listeners() -> Iterator[Address]:
    """Where this process listens for connections."""
    for sock in _sockets():
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield sock.getsockname()[:2]


def _sockets() -> Iterator[socket.socket]:
    """The internet sockets of this process, as copies that live until the next is asked for."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
            copy = os.dup(int(fd))
        except OSError:  # closed meanwhile
            continue
        try:
            sock = socket.socket(fileno=copy)
        except OSError:  # not a socket any more
            os.close(copy)
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                yield sock
