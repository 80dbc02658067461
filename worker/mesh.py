"""The groups in which the workers of one engine compute together.

A `Mesh` places one worker in a grid: `rank = stage * tensor + tensor_rank`, so the workers that
split a layer are neighbours. Every group is a stateless process group over a store whose keys
begin with the epoch: it can be left, aborted and formed again beside its predecessor while the
process and its weights live. Nothing here is global: threads of one process may each hold a mesh
of their own over a `HashStore`, processes meet over a `TCPStore`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from swell.configs.schema import ParallelConfig

GROUP_TIMEOUT_S = 120.0
"""A peer that has not joined a group or a collective after this long is taken for dead."""


class Handle(ABC):
    """An operation under way."""

    @abstractmethod
    def wait(self) -> None:
        """Return once the tensor may be used again (on CUDA: on the current stream)."""


class Group(ABC):
    """The ranks of one collective. Every member calls the same operations in the same order.

    A peer that died or left makes the operation raise `RuntimeError`; the group is then of no
    further use and the worker joins one of the next epoch.
    """

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, t: torch.Tensor) -> torch.Tensor:
        """Sum `t` over the ranks, in place; returns `t`."""

    @abstractmethod
    def all_gather(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        """The ranks' tensors of equal shape, joined along `dim` in rank order."""

    @abstractmethod
    def broadcast(self, t: torch.Tensor, src: int) -> torch.Tensor:
        """Overwrite `t` by that of rank `src`; returns `t`."""

    @abstractmethod
    def send(self, t: torch.Tensor, dst: int) -> Handle:
        """Start sending `t` to rank `dst`; `t` must not change before `wait()` returns."""

    @abstractmethod
    def recv(self, t: torch.Tensor, src: int) -> torch.Tensor:
        """Fill `t` with the next tensor sent by rank `src`; returns `t`."""

    @abstractmethod
    def close(self) -> None:
        """Leave at once: peers inside an operation get an error. Sockets and threads are freed."""


class SoloGroup(Group):
    """A group of one: collectives change nothing."""

    rank = 0
    size = 1

    def all_reduce(self, t: torch.Tensor) -> torch.Tensor:
        return t

    def all_gather(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        return t

    def broadcast(self, t: torch.Tensor, src: int) -> torch.Tensor:
        return t

    def send(self, t: torch.Tensor, dst: int) -> Handle:
        raise AssertionError(f"rank 0 of a group of one cannot send to rank {dst}")

    def recv(self, t: torch.Tensor, src: int) -> torch.Tensor:
        raise AssertionError(f"rank 0 of a group of one cannot receive from rank {src}")

    def close(self) -> None:
        pass


@dataclass
class _Sending(Handle):
    work: Any
    tensor: torch.Tensor  # kept alive until the transport has read it

    def wait(self) -> None:
        self.work.wait()


class ProcessGroup(Group):
    """A group over torch's transport: gloo on CPU, NCCL on CUDA."""

    def __init__(self, transport: dist.Backend, rank: int, size: int) -> None:
        self._transport: Any = transport
        self.rank = rank
        self.size = size

    def all_reduce(self, t: torch.Tensor) -> torch.Tensor:
        if t.is_contiguous():
            self._transport.allreduce([t]).wait()
            return t
        return t.copy_(self.all_reduce(t.contiguous()))

    def all_gather(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        t = t.contiguous()
        parts = [torch.empty_like(t) for _ in range(self.size)]
        self._transport.allgather([parts], [t]).wait()
        return torch.cat(parts, dim=dim)

    def broadcast(self, t: torch.Tensor, src: int) -> torch.Tensor:
        if not t.is_contiguous():
            return t.copy_(self.broadcast(t.contiguous(), src))
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._transport.broadcast([t], options).wait()
        return t

    def send(self, t: torch.Tensor, dst: int) -> Handle:
        t = t.contiguous()
        return _Sending(self._transport.send([t], dst, 0), t)

    def recv(self, t: torch.Tensor, src: int) -> torch.Tensor:
        if not t.is_contiguous():
            return t.copy_(self.recv(torch.empty_like(t).contiguous(), src))
        self._transport.recv([t], src, 0).wait()
        return t

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None


@dataclass(eq=False)
class Mesh:
    """One worker's place among the workers of its engine, and the groups that it is in."""

    rank: int
    epoch: int
    tensor: Group
    """The workers that split the layers of one stage."""
    pipeline: Group
    """The workers with this tensor rank, one a stage, in stage order."""
    feedback: Group
    """The same workers, for drawn tokens on their way back: NCCL runs the sends and receives of a
    group in order, and tokens must not wait behind activations nor the other way round."""

    @property
    def tensor_rank(self) -> int:
        return self.tensor.rank

    @property
    def stage(self) -> int:
        return self.pipeline.rank

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    @classmethod
    def build(
        cls,
        parallel: ParallelConfig,
        rank: int,
        store: dist.Store | None = None,
        epoch: int = 0,
        device: torch.device | str = "cpu",
        timeout_s: float = GROUP_TIMEOUT_S,
    ) -> Mesh:
        """Join the groups of `epoch` as worker `rank` (0 .. parallel.world - 1) of one engine.

        Blocks until every other worker has joined. `store` is where they find each other; an
        engine of one worker needs none. Raises `RuntimeError` if a peer does not come in time.
        """
        assert 0 <= rank < parallel.world, f"rank {rank} of a world of {parallel.world}"
        assert store is not None or parallel.world == 1, "several workers need a store to meet"
        stage, tensor_rank = divmod(rank, parallel.tensor)
        device = torch.device(device)

        def join(name: str, rank: int, size: int) -> Group:
            if size == 1:
                return SoloGroup()
            keys = dist.PrefixStore(f"epoch{epoch}/{name}", store)
            make = _nccl if device.type == "cuda" else _gloo
            return ProcessGroup(make(keys, rank, size, timeout_s, _host(store)), rank, size)

        groups: list[Group] = []
        try:
            groups.append(join(f"tensor{stage}", tensor_rank, parallel.tensor))
            groups.append(join(f"pipeline{tensor_rank}", stage, parallel.pipeline))
            groups.append(join(f"feedback{tensor_rank}", stage, parallel.pipeline))
        except BaseException:
            for group in groups:
                group.close()
            raise
        return cls(rank, epoch, *groups)

    def close(self) -> None:
        """Leave all groups at once; a peer inside an operation gets an error."""
        for group in (self.tensor, self.pipeline, self.feedback):
            group.close()


def _host(store: dist.Store | None) -> str | None:
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


def _gloo(
    store: dist.Store, rank: int, size: int, timeout_s: float, host: str | None
) -> dist.Backend:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 2
    make = dist.ProcessGroupGloo.create_device
    options._devices = [
        make(hostname=host) if host else dist.ProcessGroupGloo.create_default_device()
    ]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(
    store: dist.Store, rank: int, size: int, timeout_s: float, host: str | None
) -> dist.Backend:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, size, options)
