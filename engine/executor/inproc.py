"""Workers as threads of the engine's process: no Ray, no sockets.

The one place of this floor where torch is loaded.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from swell.configs.process import sleep_at_barriers
from swell.configs.schema import Config, ConfigError
from swell.engine.executor import (
    Executor,
    ExecutorError,
    ExecutorLimits,
    Progress,
    WorkerInfo,
    agree_limits,
    loading,
)
from swell.worker.wire import AsyncModelRunnerOutput, GroupPlan, ModelRunnerOutput, SchedulerOutput

_JOIN_S = 10.0
"""How long a worker thread may take to end."""

LoadProgress = Callable[[int, int], None]
"""Takes bytes done and bytes in all."""


def _silent(done_bytes: int, total_bytes: int) -> None:
    """One worker's progress stands for all: their shards are alike."""


class WorkerThread:
    """Owns one worker. Calls run on its thread in order, and answer by a Future."""

    def __init__(
        self, config: Config, rank: int, local_workers: int, progress: LoadProgress
    ) -> None:
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...], Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run,
            args=(config, rank, local_workers, progress),
            name=f"swell-worker-{rank}",
            daemon=True,
        )
        self._thread.start()

    def call(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((method, args, future))
        return future

    def ask_stop(self) -> None:
        self._calls.put(None)

    def join(self) -> None:
        """Wait for the end; a thread that a dead peer holds up is left to its group's timeout."""
        self._thread.join(_JOIN_S)

    def _run(self, config: Config, rank: int, local_workers: int, progress: LoadProgress) -> None:
        worker: Any = None
        failure: BaseException | None = None
        while (call := self._calls.get()) is not None:
            method, args, future = call
            try:
                if failure is not None:
                    raise ExecutorError(f"worker {rank} failed before: {failure}")
                if worker is None:
                    from swell.worker.worker import Worker

                    worker = Worker(config, rank, local_workers, local_rank=rank, progress=progress)
                future.set_result(getattr(worker, method)(*args))
            except BaseException as error:
                # Its groups are closed at once: peers in a collective must not wait for it.
                failure = failure or error
                if worker is not None:
                    worker.shutdown()
                future.set_exception(error)
            del call, args, future
        if worker is not None:
            worker.shutdown()


class InprocOutput(AsyncModelRunnerOutput):
    """Futures of one step, one for each worker."""

    def __init__(self, futures: list[Future[Any]], output_rank: int) -> None:
        self._futures = futures
        self._output_rank = output_rank

    def get_output(self) -> ModelRunnerOutput:
        if len(self._futures) > 1:
            done, _running = wait(self._futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        output: AsyncModelRunnerOutput = self._futures[self._output_rank].result()
        return output.get_output()


class InprocExecutor(Executor):
    """All workers of the engine in this process, a thread each."""

    def __init__(
        self, config: Config, *, workers_per_machine: int | None = None, **_shell: Any
    ) -> None:
        self._config = config
        self._local_workers = workers_per_machine or config.parallel.world
        self._threads: list[WorkerThread] = []

    def start(self, progress: Progress = lambda text: None) -> ExecutorLimits:
        sleep_at_barriers()
        # Threads that import at the same time can see half of a module.
        import swell.worker.worker  # noqa: F401

        store = None
        if self._config.parallel.world > 1:
            import torch.distributed as dist

            store = dist.HashStore()  # type: ignore[attr-defined]
        progress("loading weights")

        def told(done_bytes: int, total_bytes: int) -> None:
            progress(loading(done_bytes, total_bytes))

        try:
            for rank in range(self._config.parallel.world):
                tell = told if rank == 0 else _silent
                self._threads.append(WorkerThread(self._config, rank, self._local_workers, tell))
            limits = agree_limits(self._config, self._call_all("load", store, 0))
            progress("allocating the KV cache")
            self._call_all("init_cache", limits.num_blocks, limits.max_model_len)
        except BaseException as error:
            self.shutdown()
            if isinstance(error, ValueError):
                raise ConfigError(str(error)) from error
            raise
        return limits

    def execute(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        futures = [thread.call("execute_model", plan) for thread in self._threads]
        return InprocOutput(futures, self._config.parallel.world - self._config.parallel.tensor)

    def regroup(self, groups: GroupPlan) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        raise NotImplementedError

    def workers(self) -> list[WorkerInfo]:
        tensor = self._config.parallel.tensor
        return [
            WorkerInfo(rank, rank % tensor, rank // tensor, os.getpid())
            for rank in range(len(self._threads))
        ]

    def shutdown(self) -> None:
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.ask_stop()
        for thread in threads:
            thread.join()

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        futures = [thread.call(method, *args) for thread in self._threads]
        done, running = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        if running:
            raise ExecutorError(f"{method} did not finish on {len(running)} workers")
        return [future.result() for future in futures]
