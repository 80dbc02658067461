"""The transport of a group: a torch backend, and how to abort and leave it.

Another thread can abort a transport while an operation blocks in it. Between CPUs there are
`gloo_transport.py` and, on one machine, `shared_memory_transport.py`; between GPUs there is
`nccl_transport.py`. `connect.py` chooses.
"""

from __future__ import annotations

import hmac
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from swell.worker.comm.group_secret import TOKEN_BYTES, GroupSecret

T = TypeVar("T")

CONNECT_S = 20.0
"""How long peers that have all published their addresses may take to connect, in seconds."""

POLL_S = 0.01
"""How often a rank that forms a group polls for its peers and for an abort, in seconds."""


class PeersAbsent(OSError):
    """Raised when these ranks did not join, or cannot be reached."""

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


class ForeignMember(OSError):
    """Raised when a process that does not know the secret of the group has taken the place of a
    rank."""


class AbortStuck(Exception):
    """Raised when operations do not end although they were aborted: the process cannot form groups
    again and must be replaced."""


@dataclass(frozen=True, kw_only=True)
class Formation:
    """The arguments of a function that connects the ranks of one group."""

    store: dist.Store
    """Has the keys of only this group."""
    rank: int
    size: int
    timeout_s: float
    """How long an operation may wait for a peer, in seconds."""
    exchange: Callable[[str, str], list[str]]
    """Publishes this rank's text about a topic and returns those of all ranks."""
    has_messages: bool
    """Whether ranks send messages to single ranks; otherwise all operations are collective."""
    secret: GroupSecret
    host: str
    """The address of this machine at which the other ranks reach it."""
    device: torch.device
    aborted: threading.Event
    """Set when the group must not be formed any more."""


class Transport(ABC):
    """A torch backend, and how to abort and leave it."""

    uses_kernels = False
    """Whether operations are those of `swell.kernels.cpu.exchange`: `allreduce` adds the terms of
    each element in rank order and in float32, the backend has `allgather_rows`, and captures
    contain the operations."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self._aborted = False
        self._reason = ""

    @property
    def aborted(self) -> bool:
        """Whether results are not valid any more."""
        return self._aborted

    @property
    def reason(self) -> str:
        """The failure that the backend has reported, if any."""
        return self._reason

    @abstractmethod
    def wait(self, work: Any) -> None:
        """Waits until a collective operation is done (on CUDA: on the current stream). Raises
        `RuntimeError` if it fails."""

    def wait_for_peer(self, work: Any) -> None:
        """Waits like `wait` for a send or a receive."""
        self.wait(work)

    def wait_on_host(self, work: Any) -> None:
        """Waits until a collective operation is done and the host may read its result. Raises
        `RuntimeError` if it fails."""
        self.wait(work)

    def poll(self) -> bool:
        """Returns whether the backend reports a failure, which `reason` then names. Returns at
        once. May be called from any thread."""
        return False

    def drain(self) -> None:  # noqa: B027 - a wait for a message may include its arrival
        """Waits until every rank has all messages that were sent to it. Every rank calls it. Raises
        `RuntimeError` if it fails."""

    @abstractmethod
    def abort(self) -> None:
        """Begins to make operations in flight fail, here and at the peers. Returns at once. May be
        called from any thread, and again."""

    def finish_abort(self) -> None:  # noqa: B027 - an abort may end operations at once
        """Waits until the operations in flight have ended, if `abort` was called. Raises
        `AbortStuck`."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the group; called from the thread that uses it. Messages that were sent still
        arrive, unless the transport was aborted."""


def check_members(transport: Transport, formation: Formation) -> None:
    """Exchanges tokens through the group. When this returns, all ranks have formed the group.
    Raises `ForeignMember`."""
    rank, size, secret = formation.rank, formation.size, formation.secret
    own = torch.frombuffer(bytearray(secret.token(rank)), dtype=torch.uint8).to(formation.device)
    tokens = own.new_empty(size * TOKEN_BYTES)
    transport.wait_on_host(transport.backend._allgather_base(tokens, own))
    foreign = [
        peer
        for peer, token in enumerate(tokens.view(size, TOKEN_BYTES).tolist())
        if not hmac.compare_digest(bytes(token), secret.token(peer))
    ]
    if foreign:
        transport.close()
        raise ForeignMember(
            f"ranks {foreign} of {size} do not know the secret of this group: an untrusted peer "
            "reaches the network of cluster.interface, see docs/operate/security.md"
        )


def in_thread(name: str, call: Callable[[], T]) -> Future[T]:
    """Runs a call on a thread of its own, which does not keep the process alive."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # raised in the thread that reads the result
            result.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return result
