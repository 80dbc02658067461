"""Groups of ranks: their collective operations, and how these fail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from swell.configs.runtime.flight_recorder import recorder
from swell.configs.runtime.log import first_line
from swell.kernels.graph import NotCapturableError
from swell.worker.comm.transport import Transport


class GroupError(RuntimeError):
    """Raised when a group could not be formed or has failed: a peer is gone, or the group was
    aborted."""

    def __init__(self, message: str, absent: Iterable[int] = ()) -> None:
        """`absent`: engines of the plan that did not join or cannot be reached, by index."""
        super().__init__(message)
        self.absent = tuple(absent)


class Handle(ABC):
    """An operation in flight."""

    @abstractmethod
    def wait(self) -> None:
        """Waits until the tensor may be used again (on CUDA: on the current stream)."""


class Group(ABC):
    """The ranks of one collective. Every member calls the same operations in the same order.

    If a peer dies or leaves, the operation raises `GroupError`; the group cannot be used until it
    is formed again.
    """

    rank: int
    size: int

    @property
    @abstractmethod
    def uses_kernels(self) -> bool:
        """Whether operations are kernels of the CPU backend, whose captures contain them."""

    @abstractmethod
    def all_reduce(self, t: torch.Tensor) -> torch.Tensor:
        """Sums `t` over the ranks, in place; returns `t`."""

    @abstractmethod
    def all_reduce_in_order(self, t: torch.Tensor) -> torch.Tensor:
        """Sums `t` over the ranks like `all_reduce`, but on CPU and in an exact group adds the
        terms of each element in rank order, so that no bit of a row depends on the other rows:
        `all_reduce` chooses the order by the size of `t` and the position of an element in it. (The
        order does not matter for two terms, or if only one is not zero.)"""

    @abstractmethod
    def all_gather(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenates the ranks' tensors of equal shape along `dim` in rank order."""

    @abstractmethod
    def all_gather_columns(self, *columns: torch.Tensor) -> list[torch.Tensor]:
        """Columns [S] of numbers that a float64 represents -> [S, size] each, in rank order, with
        as few operations as possible."""

    @abstractmethod
    def reduce_scatter(self, t: torch.Tensor) -> torch.Tensor:
        """t [size * n, ...] -> [n, ...]: part `rank` of the sum over the ranks."""

    @abstractmethod
    def broadcast(self, t: torch.Tensor, src: int) -> torch.Tensor:
        """Overwrites `t` with that of rank `src`; returns `t`."""

    @abstractmethod
    def send(self, t: torch.Tensor, dst: int) -> Handle:
        """Starts sending `t` to rank `dst`; `t` must not change before `wait()` returns."""

    @abstractmethod
    def recv(self, t: torch.Tensor, src: int) -> torch.Tensor:
        """Fills `t` with the next tensor sent by rank `src`; returns `t`."""

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        """In this context, operations return this rank's own values in the right shape, without
        peers."""
        yield

    @abstractmethod
    def check(self) -> None:
        """Raises `GroupError` if the group was aborted: results since then are not valid."""

    @abstractmethod
    def poll(self) -> bool:
        """Returns whether a peer is known to have failed; no operation may have noticed it. Returns
        at once. May be called from any thread."""

    @abstractmethod
    def drain(self) -> None:
        """Waits until every member has all messages that were sent to it. Every member calls
        it."""

    @abstractmethod
    def abort(self) -> None:
        """Begins to make the operations in flight fail, here and at the peers. Returns at once. May
        be called from any thread."""

    @abstractmethod
    def finish_abort(self) -> None:
        """Waits until the operations in flight have ended, if `abort` was called. Raises
        `AbortStuck`."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the group: peers inside an operation get an error. Frees sockets and threads.
        Raises `AbortStuck`."""


class SoloGroup(Group):
    """A group of one rank: collectives change nothing."""

    rank = 0
    size = 1
    uses_kernels = True  # collectives compute nothing

    def all_reduce(self, t: torch.Tensor) -> torch.Tensor:
        return t

    def all_reduce_in_order(self, t: torch.Tensor) -> torch.Tensor:
        return t

    def all_gather(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        return t

    def all_gather_columns(self, *columns: torch.Tensor) -> list[torch.Tensor]:
        return [column.unsqueeze(1) for column in columns]

    def reduce_scatter(self, t: torch.Tensor) -> torch.Tensor:
        return t

    def broadcast(self, t: torch.Tensor, src: int) -> torch.Tensor:
        return t

    def send(self, t: torch.Tensor, dst: int) -> Handle:
        raise AssertionError(f"rank 0 of a group of one cannot send to rank {dst}")

    def recv(self, t: torch.Tensor, src: int) -> torch.Tensor:
        raise AssertionError(f"rank 0 of a group of one cannot receive from rank {src}")

    def check(self) -> None:
        pass

    def poll(self) -> bool:
        return False

    def drain(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def finish_abort(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class _Sending(Handle):
    group: ProcessGroup
    work: Any
    tensor: torch.Tensor  # kept alive until the transport has read it

    def wait(self) -> None:
        self.group.finish("send", self.work)


class ProcessGroup(Group):
    """A group over a transport; `reopen` sets the transport and `close` removes it."""

    def __init__(
        self, name: str, rank: int, size: int, exact: bool = False, has_messages: bool = True
    ) -> None:
        """`name`: used in messages and in the store's keys; `exact`: whether `all_reduce_in_order`
        adds in rank order on every device; `has_messages`: whether members may `send`."""
        self.name = name
        self.rank = rank
        self.size = size
        self.exact, self.has_messages = exact, has_messages
        self._transport: Transport | None = None
        self._dry_run = False
        self._counts = recorder().counter(f"{name}, rank {rank} of {size}")
        """The operations that were started and finished since the group was formed."""

    @contextmanager
    def dry_run(self) -> Iterator[None]:
        self._dry_run = True
        try:
            yield
        finally:
            self._dry_run = False

    def reopen(self, transport: Transport) -> None:
        """Closes the current transport and uses this one."""
        self.close()
        self._transport = transport
        self._counts[0] = self._counts[1] = 0

    def all_reduce(self, t: torch.Tensor) -> torch.Tensor:
        if not t.is_contiguous():
            return t.copy_(self.all_reduce(t.contiguous()))
        self._run("allreduce", [t], _on_current_stream(AllreduceOptions()))
        return t

    def all_reduce_in_order(self, t: torch.Tensor) -> torch.Tensor:
        elements, is_in_order = t.numel(), self.exact or t.device.type == "cpu"
        if self.size < 3 or not is_in_order or not elements or self._dry_run:
            return self.all_reduce(t)
        if self.uses_kernels:
            return self.all_reduce(t)
        # Each rank sums one part of the elements: [ranks, elements / ranks] is sent and received.
        sent = t.new_zeros(self.size, -(-elements // self.size))
        sent.view(-1)[:elements] = t.reshape(-1)
        terms = torch.empty_like(sent)
        self._run("alltoall_base", terms, sent, [], [])
        total = terms[0].float()
        for term in terms[1:]:
            total += term
        whole = self.all_gather(total.to(t.dtype), 0)[:elements]
        return t.copy_(whole.view(t.shape))

    def all_gather(self, t: torch.Tensor, dim: int) -> torch.Tensor:
        t = t.contiguous()
        if self._dry_run:
            return torch.cat([t] * self.size, dim=dim)
        if dim < 0:
            dim += t.dim()
        shape = [*t.shape]
        shape[dim] *= self.size
        if not t.numel():
            return t.new_empty(shape)
        if self.uses_kernels and 0 < dim == t.dim() - 1:
            rows = torch.empty(shape, dtype=t.dtype)  # unlike `new_empty`, it can be captured
            self._run("allgather_rows", rows.flatten(0, -2), t.flatten(0, -2))
            return rows
        # [size * n, ...] for t [n, ...]: the result, if it is along dimension 0
        parts = t.new_empty(self.size * len(t), *t.shape[1:])
        self._run("_allgather_base", parts, t, _on_current_stream(AllgatherOptions()))
        if dim == 0:
            return parts
        return parts.view(self.size, *t.shape).movedim(0, dim).reshape(shape)

    def all_gather_columns(self, *columns: torch.Tensor) -> list[torch.Tensor]:
        if self.uses_kernels:
            return [self.all_gather(column.unsqueeze(1), 1) for column in columns]
        whole = torch.stack([column.double() for column in columns]).unsqueeze(0)
        parts = self.all_gather(whole, 0).unbind(1)  # [size, S] each
        return [part.T.to(old.dtype) for part, old in zip(parts, columns, strict=True)]

    def reduce_scatter(self, t: torch.Tensor) -> torch.Tensor:
        if self._dry_run:
            return t[: len(t) // self.size].clone()
        part = t.new_empty(len(t) // self.size, *t.shape[1:])
        options = _on_current_stream(ReduceScatterOptions())
        self._run("_reduce_scatter_base", part, t.contiguous(), options)
        return part

    def broadcast(self, t: torch.Tensor, src: int) -> torch.Tensor:
        if not t.is_contiguous():
            return t.copy_(self.broadcast(t.contiguous(), src))
        options = _on_current_stream(BroadcastOptions())
        options.rootRank = src
        self._run("broadcast", [t], options)
        return t

    def send(self, t: torch.Tensor, dst: int) -> Handle:
        assert self.has_messages, self.name
        t = t.contiguous()
        return _Sending(self, self._start("send", [t], dst, 0), t)

    def recv(self, t: torch.Tensor, src: int) -> torch.Tensor:
        if not t.is_contiguous():
            return t.copy_(self.recv(torch.empty_like(t).contiguous(), src))
        self._run("recv", [t], src, 0)
        return t

    @property
    def uses_kernels(self) -> bool:
        return self._transport is not None and self._transport.uses_kernels

    def check(self) -> None:
        transport = self._transport
        if transport is None or transport.aborted:
            reason = f": {transport.reason}" if transport is not None and transport.reason else ""
            raise GroupError(f"group {self.name!r} was aborted or left{reason}")

    def poll(self) -> bool:
        transport = self._transport
        return transport is not None and transport.poll()

    def drain(self) -> None:
        transport = self._transport
        if transport is not None and not transport.aborted:
            self._guard("drain", transport.drain)

    def abort(self) -> None:
        transport = self._transport
        if transport is not None:
            transport.abort()

    def finish_abort(self) -> None:
        if self._transport is not None:
            self._transport.finish_abort()

    def close(self) -> None:
        if self._transport is not None:
            try:
                self._transport.close()  # `abort` must find the transport while it is closed
            finally:
                self._transport = None

    def finish(self, operation: str, work: Any) -> None:
        """Waits for an operation that `_start` returned. Raises `GroupError`."""
        self.check()
        transport = self._transport
        assert transport is not None
        wait = transport.wait_for_peer if operation in ("send", "recv") else transport.wait
        self._guard(operation, wait, work)
        self._counts[1] += 1

    def _run(self, operation: str, *args: Any) -> None:
        if self._dry_run:
            return
        self.finish(operation, self._start(operation, *args))

    def _start(self, operation: str, *args: Any) -> Any:
        self.check()
        assert self._transport is not None
        self._counts[0] += 1
        return self._guard(operation, getattr(self._transport.backend, operation), *args)

    def _guard(self, operation: str, call: Callable[..., Any], *args: Any) -> Any:
        try:
            result = call(*args)
        except (torch.OutOfMemoryError, torch.AcceleratorError, NotCapturableError):
            raise  # this worker's own error: its peers are not to blame
        except RuntimeError as error:
            raise GroupError(f"group {self.name!r}: {operation}: {first_line(error)}") from error
        self.check()
        return result


def _on_current_stream(options: Any) -> Any:
    """Sets that an operation runs on the current stream of a GPU, not on one of its own, which the
    current stream would have to wait for."""
    options.asyncOp = False
    return options


def make_group(
    name: str, rank: int, size: int, exact: bool = False, has_messages: bool = True
) -> Group:
    """Returns a group that is not formed yet, or a `SoloGroup`, which does not need forming."""
    return SoloGroup() if size == 1 else ProcessGroup(name, rank, size, exact, has_messages)
