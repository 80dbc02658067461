"""The transport between CPUs of several machines: gloo.

gloo cannot abort an operation that blocks: the operation fails only when its connection breaks. So
an abort shuts the connections down, which looks like the death of the peer to both ends. Also, gloo
accepts and keeps every connection; so once a group is formed, the kernel refuses further ones.

gloo does not expose its sockets. They are found among the file descriptors of the process
(`/proc/self/fd`, so this needs Linux), by the addresses at which the ranks of the group listen.
NCCL has its own abort and must never use this module.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from swell.worker.comm.transport import (
    CONNECT_S,
    Formation,
    PeersAbsent,
    Transport,
    check_members,
)

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend  # dist.Backend is a class of names

Address = tuple[str, int]
"""Host and port."""

_PROBE_S = 0.5
"""How long the host of a peer may take to accept or refuse a connection, in seconds."""

_POLL_TIMEOUT = timedelta(seconds=0.2)
"""How long an aborted gloo operation may take to fail."""

_SO_ATTACH_FILTER = 26
_BPF_RETURN = 0x06
"""The filter instruction that returns how many bytes of a packet pass: none."""

_listening = threading.Lock()
"""Held while a device is made, so that each thread finds its own listening socket."""

_leaked_backends: list[Backend] = []
"""Backends with an operation that never completes: destroying one would wait for it."""


class PeerWaiter:
    """Waits for operations on a separate thread, which can be abandoned if an operation never
    completes."""

    def __init__(self) -> None:
        self._works: SimpleQueue[tuple[Any, timedelta, Future[None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="gloo-peer", daemon=True)
        self._thread.start()

    def wait(self, work: Any, timeout: timedelta) -> Future[None]:
        """Queues a wait; operations are waited for one after the other."""
        done: Future[None] = Future()
        self._works.put((work, timeout, done))
        return done

    def leave(self) -> None:
        """Abandons the thread: it stops when its last operation completes, if ever."""
        self._works.put(None)

    def close(self) -> None:
        """Stops the thread; no operation may be pending. The thread must not outlive the
        interpreter: it destroys operations, which release the interpreter's lock and could not take
        it again."""
        self.leave()
        self._thread.join()

    def _run(self) -> None:
        while (task := self._works.get()) is not None:
            work, timeout, done = task
            try:
                work.wait(timeout)
                done.set_result(None)
            except Exception as error:  # raised in the caller, which waits for the future
                done.set_exception(error)


class GlooTransport(Transport):
    """The transport between CPUs. In gloo, an operation that starts just as its connection breaks
    may never complete: after an abort, `wait` raises within `_POLL_TIMEOUT` and abandons such an
    operation."""

    def __init__(self, backend: Backend, members: set[Address], timeout_s: float) -> None:
        """`members`: the address at which each rank listens for connections of only this group."""
        super().__init__(backend)
        self._members = members
        self._timeout = timedelta(seconds=timeout_s)
        self._stuck = False
        self._waiter: PeerWaiter | None = None

    def wait(self, work: Any) -> None:
        self._wait(lambda: work.wait(_POLL_TIMEOUT))

    def wait_for_peer(self, work: Any) -> None:
        """gloo breaks the connection when a wait for a send or receive times out, so another thread
        waits for the whole timeout."""
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
                    raise RuntimeError("the operation was aborted") from error

    def close(self) -> None:
        if self._stuck:  # stopping the thread or backend would wait for the operation
            self._aborted = True
            if self._waiter is not None:
                self._waiter.leave()
            return
        if self._waiter is not None:
            self._waiter.close()
        self._aborted = True
        self.backend.abort()

    def abort(self) -> None:
        self._aborted = True
        _shut_down_connections(self._members)


def gloo_key(rank: int) -> str:
    """Returns the key under which gloo publishes a rank's own address in the store of a group."""
    return f"0/{rank}"


def connect_gloo(formation: Formation) -> Transport:
    """Connects the ranks of a group. Raises `PeersAbsent`, `ForeignMember` and `RuntimeError`."""
    rank, size, timeout_s = formation.rank, formation.size, formation.timeout_s
    device, own_address = _listening_device(formation.host)
    members = []
    for address in formation.exchange("address", "{} {}".format(*own_address)):
        peer_host, _, peer_port = address.rpartition(" ")
        members.append((peer_host, int(peer_port)))
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stub
    options._timeout = timedelta(seconds=min(timeout_s, CONNECT_S))
    options._threads = 2
    options._devices = [device]
    try:
        backend = dist.ProcessGroupGloo(formation.store, rank, size, options)
    except RuntimeError as error:
        if absent := [peer for peer, address in enumerate(members) if not _answers(address)]:
            where = ", ".join(f"{peer} at {members[peer][0]}" for peer in absent)
            raise PeersAbsent(f"no connection to ranks {where}: {error}", absent) from error
        raise
    transport = GlooTransport(backend, set(members), timeout_s)
    check_members(transport, formation)
    refuse_connections(own_address)
    backend.set_timeout(timedelta(seconds=timeout_s))
    return transport


def _answers(address: Address) -> bool:
    """Whether the host is up: a host that refuses a connection is."""
    try:
        socket.create_connection(address, _PROBE_S).close()
    except ConnectionError:
        return True
    except OSError:
        return False
    return True


def _listening_device(host: str) -> tuple[dist.ProcessGroupGloo.Device, Address]:
    """Returns a gloo device at `host`, and the address at which it listens."""
    make = dist.ProcessGroupGloo
    with _listening:
        while True:
            before = set(_listeners())
            device = make.create_device(hostname=host, lazy_init=False)
            found = set(_listeners()) - before
            if len(found) == 1:  # otherwise another part of the process began to listen meanwhile
                return device, found.pop()


def refuse_connections(address: Address) -> None:
    """Makes the kernel drop everything that arrives at the socket that listens there: the group is
    formed, and its connections are other sockets."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(drop_all))
    for sock in _sockets():
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if listens and sock.getsockname()[:2] == address:
            sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _shut_down_connections(members: set[Address]) -> None:
    """Shuts down all sockets of this process that are connected from or to one of `members`."""
    for sock in _sockets():
        try:
            if {sock.getsockname()[:2], sock.getpeername()[:2]} & members:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            """The socket only listens, or its connection is closed."""


def _listeners() -> Iterator[Address]:
    """Yields the addresses at which this process listens for connections."""
    for sock in _sockets():
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield sock.getsockname()[:2]


def _sockets() -> Iterator[socket.socket]:
    """Yields the internet sockets of this process; each is a duplicate that is closed before the
    next."""
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
