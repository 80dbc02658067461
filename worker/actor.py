"""A worker as a Ray actor: the shell between the engine's channel and `Worker`."""

from __future__ import annotations

import os
from collections import deque
from datetime import timedelta
from typing import Any

import msgspec
import ray

from swell.configs.process import sleep_at_barriers
from swell.configs.schema import Config
from swell.coordinator.channel import ChannelAddress, ChannelKeys, Outlet
from swell.worker.wire import (
    AsyncModelRunnerOutput,
    SchedulerOutput,
    Shutdown,
    WorkerCommand,
    WorkerFailure,
    WorkerHello,
    WorkerLimits,
    WorkerProgress,
)

_STORE_TIMEOUT = timedelta(seconds=120)


@ray.remote(num_cpus=0, max_restarts=0)
class WorkerActor:
    """Methods are called once each, in the order in which they stand here."""

    def __init__(
        self,
        config: Config,
        rank: int,
        local_workers: int,
        keys: ChannelKeys,
        engine: ChannelAddress,
    ) -> None:
        self._rank = rank
        self._outlet: Outlet[WorkerCommand] = Outlet(engine, WorkerCommand, keys)
        self._config = config
        self._local_workers = local_workers
        self._worker: Any = None
        self._store: Any = None

    def open_store(self) -> tuple[str, int]:
        """Host the engine's store (rank 0): where its groups find each other."""
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def load(self, store: tuple[str, int], epoch: int) -> WorkerLimits:
        sleep_at_barriers()
        from torch.distributed import TCPStore

        from swell.worker.worker import Worker

        # Ray shows a worker only the GPU that it gave it.
        self._worker = Worker(
            self._config, self._rank, self._local_workers, local_rank=0, progress=self._tell
        )
        if self._store is None:
            self._store = TCPStore(*store, is_master=False, timeout=_STORE_TIMEOUT)
        limits = self._worker.load(self._store, epoch)
        return msgspec.structs.replace(limits, pid=os.getpid())

    def init_cache(self, num_blocks: int, max_model_len: int) -> None:
        self._worker.init_cache(num_blocks, max_model_len)

    def run(self) -> None:
        """Execute plans until `Shutdown`. A failed step is told to the engine, then raised.

        Results are waited for only when no plan is there to be started: the device never idles
        because the host waits for it.
        """
        outlet = self._outlet
        outlet.send(WorkerHello(self._rank))
        due: deque[tuple[int, AsyncModelRunnerOutput]] = deque()
        step = 0
        try:
            while True:
                command = outlet.receive(0.0 if due else None)
                if isinstance(command, Shutdown):
                    return
                if command is None:
                    step, output = due.popleft()
                    outlet.send(output.get_output())
                    continue
                assert isinstance(command, SchedulerOutput)
                step = command.step
                started = self._worker.execute_model(command)
                if started is not None:
                    due.append((step, started))
        except Exception as error:
            outlet.send(WorkerFailure(step, self._rank, f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._worker.shutdown()
            outlet.close()

    def _tell(self, done_bytes: int, total_bytes: int) -> None:
        self._outlet.send(WorkerProgress(self._rank, done_bytes, total_bytes))
