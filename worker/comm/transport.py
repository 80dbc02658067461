"""The backend of a group's operations: gloo between CPUs, NCCL between GPUs.

Another thread can abort a transport while an operation blocks in it. NCCL has that built in; for
gloo see `gloo_sockets.py`, which only `GlooTransport` uses.
"""

from __future__ import annotations

import hmac
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from swell.worker.comm.gloo_sockets import (
    Address,
    listening_device,
    refuse_connections,
    shut_down_connections,
)
from swell.worker.comm.group_secret import TOKEN_BYTES, GroupSecret

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend  # dist.Backend is a class of names

POLL_S = 0.01
"""How often a rank that forms a group polls for its peers and for an abort, in seconds."""

CONNECT_S = 20.0
"""How long peers that have all published their addresses may take to connect, in seconds."""

_PROBE_S = 0.5
"""How long the host of a peer may take to accept or refuse a connection, in seconds."""

_POLL_TIMEOUT = timedelta(seconds=0.2)
"""How long an aborted gloo operation may take to fail."""

_leaked_backends: list[Backend] = []
"""Backends with an operation that never completes: destroying one would wait for it."""


class PeersAbsent(OSError):
    """Raised when these ranks did not join, or cannot be reached."""

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


class ForeignMember(OSError):
    """Raised when a process that does not know the secret of the group has taken the place of a
    rank."""


ExchangeAddresses = Callable[[str], list[str]]
"""Publishes this rank's address and returns those of all ranks."""


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


class Transport:
    """A torch backend, and how to abort and leave it."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.aborted = False

    def wait(self, work: Any) -> None:
        """Waits until a collective operation is done. Raises `RuntimeError` if it fails."""
        work.wait()

    def wait_for_peer(self, work: Any) -> None:
        """Waits until a send or a receive is done. Raises `RuntimeError` if it fails."""
        work.wait()

    def abort(self) -> None:
        """Makes operations in flight fail, here and at the peers. May be called from any thread."""
        self.aborted = True
        self.backend.abort()

    def close(self) -> None:
        """Leaves the group; called from the thread that uses it. Messages that were sent still
        arrive."""
        self.aborted = True
        self.backend.abort()


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
            self.aborted = True
            if self._waiter is not None:
                self._waiter.leave()
            return
        if self._waiter is not None:
            self._waiter.close()
        super().close()

    def abort(self) -> None:
        self.aborted = True
        shut_down_connections(self._members)


def connect(
    device_type: str,
    store: dist.Store,
    rank: int,
    size: int,
    timeout_s: float,
    aborted: threading.Event,
    secret: GroupSecret,
    host: str = "127.0.0.1",
) -> Transport:
    """Finds the other ranks through `store` and connects to them, if they know the secret.

    `host`: the address of this machine at which the other ranks reach it. The address to which the
    machine's own host name resolves does not matter.

    Raises `PeersAbsent` if peers do not publish their addresses in time, or have not when `aborted`
    is set, or if their hosts do not answer; `ForeignAddress` and `ForeignMember` if an untrusted
    peer poses as a peer; `RuntimeError` if the store or peers are gone.
    """
    start = TRANSPORTS[device_type]
    keys = dist.PrefixStore(secret.prefix, store)

    def exchange_addresses(address: str) -> list[str]:
        """Publishes this rank's address and returns those of all ranks."""
        keys.set(f"address{rank}", secret.sign(rank, address))
        names = [f"address{peer}" for peer in range(size)]
        deadline = time.monotonic() + timeout_s
        while not keys.check(names):
            is_aborted = aborted.wait(POLL_S)
            if is_aborted or time.monotonic() > deadline:
                absent = [peer for peer in range(size) if not keys.check(names[peer : peer + 1])]
                when = "before it was aborted" if is_aborted else f"in {timeout_s:g} s"
                raise PeersAbsent(f"ranks {absent} of {size} did not connect {when}", absent)
        return [secret.open(peer, keys.get(name).decode()) for peer, name in enumerate(names)]

    return start(keys, rank, size, timeout_s, exchange_addresses, secret, host)


def _gloo(
    store: dist.Store,
    rank: int,
    size: int,
    timeout_s: float,
    exchange: ExchangeAddresses,
    secret: GroupSecret,
    host: str,
) -> Transport:
    device, own_address = listening_device(host)
    members = []
    for address in exchange("{} {}".format(*own_address)):
        peer_host, _, peer_port = address.rpartition(" ")
        members.append((peer_host, int(peer_port)))
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stub
    options._timeout = timedelta(seconds=min(timeout_s, CONNECT_S))
    options._threads = 2
    options._devices = [device]
    try:
        backend = dist.ProcessGroupGloo(store, rank, size, options)
    except RuntimeError as error:
        if absent := [peer for peer, address in enumerate(members) if not _answers(address)]:
            where = ", ".join(f"{peer} at {members[peer][0]}" for peer in absent)
            raise PeersAbsent(f"no connection to ranks {where}: {error}", absent) from error
        raise
    transport = GlooTransport(backend, set(members), timeout_s)
    _check_members(transport, rank, size, secret)
    refuse_connections(own_address)
    backend.set_timeout(timedelta(seconds=timeout_s))
    return transport


def _check_members(transport: Transport, rank: int, size: int, secret: GroupSecret) -> None:
    """Exchanges tokens through the group. When this returns, all ranks have formed the group, so no
    further connection is needed. Raises `ForeignMember`."""
    own = torch.frombuffer(bytearray(secret.token(rank)), dtype=torch.uint8)
    tokens = [torch.empty(TOKEN_BYTES, dtype=torch.uint8) for _ in range(size)]
    allgather = transport.backend.allgather  # type: ignore[attr-defined]  # not in torch's stub
    transport.wait(allgather([tokens], [own]))
    foreign = [
        peer
        for peer, token in enumerate(tokens)
        if not hmac.compare_digest(bytes(token.tolist()), secret.token(peer))
    ]
    if foreign:
        transport.close()
        raise ForeignMember(
            f"ranks {foreign} of {size} do not know the secret of this group: an untrusted peer "
            "reaches the network of cluster.interface, see docs/operate/security.md"
        )


def _answers(address: Address) -> bool:
    """Whether the host is up: a host that refuses a connection is."""
    try:
        socket.create_connection(address, _PROBE_S).close()
    except ConnectionError:
        return True
    except OSError:
        return False
    return True


def _nccl(
    store: dist.Store,
    rank: int,
    size: int,
    timeout_s: float,
    exchange: ExchangeAddresses,
    secret: GroupSecret,
    host: str,
) -> Transport:
    exchange(host)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return Transport(dist.ProcessGroupNCCL(store, rank, size, options))


TRANSPORTS: dict[str, Callable[..., Transport]] = {"cpu": _gloo, "cuda": _nccl}
"""Device type -> the function that makes its transport."""
