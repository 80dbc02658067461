"""The transport between GPUs: torch's ProcessGroupNCCL, without its reactions to failures.

If an operation fails or takes long, torch terminates the process. But this process has the weights,
and the engine decides which process is lost; so `ENVIRONMENT` switches these reactions off, and
every deadline is one of this file or of the engine.

An abort blocks until the communicator's kernels have ended, and frees memory, for which CUDA waits
for the kernels of all communicators of the device. So communicators that are aborted one after the
other can wait for each other. Torch's `_group_start` does not help: it groups the calls of one
thread, and torch aborts on a thread that it makes. Therefore `abort` only starts a thread; a worker
calls it for all of its communicators, and then all kernels end.

Eagerly connected communicators run sends and receives in the order of the calls, like collectives.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from swell.configs.runtime.log import first_line
from swell.worker.comm.transport import (
    POLL_S,
    AbortStuck,
    Formation,
    Transport,
    check_members,
    in_thread,
)

CONNECT_S = 60.0
"""How long peers that have all published their addresses may take to connect, in seconds. NCCL
examines the topology of the machine first."""

ABORT_S = 20.0
"""How long kernels may take to end after an abort, in seconds."""

ENVIRONMENT = {
    # A peer's death would terminate this process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # A CUDA call that takes eight minutes would terminate this process.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # After a failure torch would write a file, and sleep a minute for each operation in flight with
    # a lock that the next operation needs.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # By default a rank waits half an hour for peers that connect.
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": f"{CONNECT_S:.0f}",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""Variables that torch reads when it makes a backend."""


class NcclWork(Protocol):
    """An operation that was queued on the device."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Lets the current stream wait. With `timeout`, also the host."""


class NcclBackend(Protocol):
    """The methods of ProcessGroupNCCL that Swell uses. Operations whose options have
    `asyncOp=False` run on the current stream and return None."""

    def eager_connect_single_device(self, device: torch.device) -> None: ...

    def allreduce(self, tensors: list[torch.Tensor], options: Any = ...) -> NcclWork | None: ...

    def _allgather_base(
        self, out: torch.Tensor, t: torch.Tensor, options: Any = ...
    ) -> NcclWork | None: ...

    def get_error(self) -> ErrorType: ...

    def abort(self) -> None: ...


class NcclTransport(Transport):
    backend: NcclBackend

    def __init__(self, backend: NcclBackend, device: torch.device, timeout_s: float) -> None:
        super().__init__(backend)
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        self._lock = threading.Lock()
        self._abort: Future[None] | None = None
        """The abort, which runs on a thread of its own."""

    def wait(self, work: NcclWork | None) -> None:
        if work is not None:
            work.wait()

    def wait_on_host(self, work: NcclWork | None) -> None:
        assert work is not None, "only an asynchronous operation has a deadline"
        work.wait(self._timeout)
        if self.aborted:  # the kernel has ended, but without a result
            raise RuntimeError("the operation was aborted")

    def poll(self) -> bool:
        if self.aborted or (error := self.backend.get_error()) == ErrorType.SUCCESS:
            return False
        self._reason = f"NCCL reports {error.name}"
        return True

    def drain(self) -> None:
        self.wait_on_host(self.backend.allreduce([torch.zeros(1, device=self._device)]))

    def abort(self) -> None:
        with self._lock:
            if self._abort is None:
                self._aborted = True
                self._abort = in_thread("nccl-abort", self.backend.abort)

    def finish_abort(self) -> None:
        if self._abort is None:
            return
        try:
            self._abort.result(ABORT_S)
        except TimeoutError:
            text = f"the operations on {self._device} did not end in {ABORT_S:g} s after an abort"
        except RuntimeError as error:
            text = f"the operations on {self._device} could not be aborted: {first_line(error)}"
        else:
            return
        raise AbortStuck(f"{text}; the worker must be replaced")

    def close(self) -> None:
        self._synchronize()
        self.abort()
        self.finish_abort()

    def _synchronize(self) -> None:
        """Waits until the device has computed what was queued, unless that was aborted."""
        if self.aborted:
            return
        reached = torch.cuda.Event()
        reached.record(torch.cuda.current_stream(self._device))
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not (reached.query() or self.aborted or time.monotonic() > deadline):
            time.sleep(POLL_S)


def connect_nccl(formation: Formation) -> Transport:
    """Connects the ranks of a group. Raises `PeersAbsent`, `ForeignMember` and `RuntimeError`."""
    formation.exchange("address", formation.host)
    os.environ.update(ENVIRONMENT)
    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking = 0
    options._timeout = timedelta(seconds=formation.timeout_s)
    made = dist.ProcessGroupNCCL(formation.store, formation.rank, formation.size, options)
    backend = cast("NcclBackend", made)  # torch's stub lacks the operations
    transport = NcclTransport(backend, formation.device, formation.timeout_s)

    def form() -> None:
        backend.eager_connect_single_device(formation.device)
        check_members(transport, formation)

    # The first operation blocks until all ranks have connected, so another thread waits for it.
    formed = in_thread("nccl-connect", form)
    deadline = time.monotonic() + CONNECT_S
    while not formed.done():
        if formation.aborted.wait(POLL_S) or time.monotonic() > deadline:
            transport.abort()
            when = "before it was aborted" if formation.aborted.is_set() else f"in {CONNECT_S:g} s"
            raise RuntimeError(f"the ranks did not connect {when}")
    try:
        formed.result()
    except BaseException:
        transport.abort()
        raise
    return transport
