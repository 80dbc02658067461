"""Runs workers as threads of the engine's process: no Ray, no sockets.

The only file of `engine/` that imports torch.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from typing import Any

import msgspec

from swell.configs.runtime.log import StructuredLogger
from swell.configs.runtime.process import prepare_for_torch
from swell.configs.schema import Config, ConfigError
from swell.engine.executor import (
    ALLOCATING_CACHE,
    LOADING_LIBRARIES,
    Executor,
    ExecutorError,
    ExecutorLimits,
    GroupBroken,
    Progress,
    WorkerInfo,
    agree_limits,
    phase_text,
)
from swell.engine.executor.adapter_loads import QueuedLoads
from swell.worker.wire import (
    AdapterLoaded,
    AsyncModelRunnerOutput,
    CompileProgress,
    GroupPlan,
    LoadAdapter,
    ModelRunnerOutput,
    Regrouped,
    SchedulerOutput,
    StartMessage,
)

_JOIN_S = 10.0
"""How long a worker thread may take to stop."""
_FAILURE_GRACE_S = 1.0
"""Time within which the peers of a failed worker notice the failure."""
_POLL_S = 0.1
"""How often a wait for groups checks whether they were aborted."""


class WorkerThread:
    """Owns one worker. Calls run on its thread in order, and return a Future."""

    def __init__(
        self,
        config: Config,
        rank: int,
        local_workers: int,
        progress: Callable[[StartMessage], None],
        host: str = "127.0.0.1",
        gpu: int = 0,
    ) -> None:
        self._calls: queue.SimpleQueue[tuple[str, tuple[Any, ...], Future[Any]] | None]
        self._calls = queue.SimpleQueue()
        self._worker: Any = None
        self._thread = threading.Thread(
            target=self._run,
            args=(config, rank, local_workers, progress, host, gpu),
            name=f"swell-worker-{rank}",
            daemon=True,
        )
        self._thread.start()

    def call(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((method, args, future))
        return future

    def request_stop(self) -> None:
        self._calls.put(None)

    def join(self) -> None:
        """Waits until the thread has stopped; a thread that a dead peer blocks is left to its
        group's timeout."""
        self._thread.join(_JOIN_S)

    def abort(self, generation: int) -> None:
        """Lets the worker leave its groups, even inside an operation, unless they are newer."""
        if self._worker is not None:
            self._worker.abort(generation)

    @property
    def progress_counter(self) -> int:
        return self._worker.progress_counter if self._worker is not None else 0

    def _run(
        self,
        config: Config,
        rank: int,
        local_workers: int,
        progress: Callable[[StartMessage], None],
        host: str,
        gpu: int,
    ) -> None:
        """Runs calls until stopped. Every call gets an answer, even after an exception: the
        engine's loop waits for it."""
        failure: BaseException | None = None
        broken = False
        try:
            from swell.worker.worker import GroupError, Worker  # type: ignore[attr-defined]
        except BaseException as error:
            failure, GroupError = error, ()  # type: ignore[misc, assignment]
        while (call := self._calls.get()) is not None:
            method, args, future = call
            try:
                if failure is not None:
                    raise ExecutorError(f"worker {rank} has already failed: {failure}")
                if broken and method == "execute_model":
                    raise GroupError("the step was planned before its groups failed")
                if self._worker is None:
                    self._worker = Worker(config, rank, local_workers, gpu, progress, host)
                result = getattr(self._worker, method)(*args)
                broken = broken and method != "regroup"
                future.set_result(result)
            except GroupError as error:
                broken = True
                failure = _failure(self._worker.abort)
                future.set_exception(GroupBroken(f"worker {rank}: {error}", error.absent))
            except BaseException as error:
                # Its groups are closed at once: peers in a collective must not wait for it.
                failure = failure or error
                if self._worker is not None:
                    _failure(self._worker.shutdown)
                future.set_exception(error)
            del call, args, future
        if self._worker is not None:
            _failure(self._worker.shutdown)


def _failure(leave: Callable[[], None]) -> Exception | None:
    """Lets a worker leave its groups; logs and returns its exception, if there is one."""
    try:
        leave()
    except Exception as error:
        StructuredLogger("engine.worker").exception("a worker could not leave its groups", error)
        return error
    return None


class InprocOutput(AsyncModelRunnerOutput):
    """The futures of one step, one for each worker."""

    def __init__(
        self, futures: list[Future[Any]], output_rank: int, abort: Callable[[], None]
    ) -> None:
        """`abort`: aborts the groups with which the step is computed."""
        self._futures = futures
        self._output_rank = output_rank
        self._abort = abort

    def get_output(self) -> ModelRunnerOutput:
        wait(self._futures, return_when=FIRST_EXCEPTION)
        raise_first(self._futures, self._abort)
        output: AsyncModelRunnerOutput = self._futures[self._output_rank].result()
        return output.get_output()


def has_failed(futures: list[Future[Any]]) -> bool:
    return any(future.done() and future.exception() for future in futures)


def raise_first(futures: list[Future[Any]], abort: Callable[[], None]) -> None:
    """Raises an exception of the futures, if there is one: preferably a worker's own failure,
    rather than that its peers noticed it. Peers on a GPU do not notice it, so `abort` ends their
    operations."""
    if not has_failed(futures):
        return
    if not all(future.done() for future in futures):
        abort()
    wait(futures, timeout=_FAILURE_GRACE_S)
    errors = [error for future in futures if future.done() and (error := future.exception())]
    raise min(errors, key=lambda error: isinstance(error, GroupBroken))


class InprocExecutor(Executor):
    """All workers of the engine in this process, one thread each."""

    def __init__(
        self,
        config: Config,
        *,
        workers_per_machine: int | None = None,
        host: str = "127.0.0.1",
        gpus: Sequence[int] = (),
        **_shell: Any,
    ) -> None:
        """`host`: address at which workers of other engines can reach this process. `gpus`: torch's
        indices of the GPUs of this process, one for each worker; by default the first ones."""
        self._config = config
        self._host = host
        self._store: tuple[str, int] | None = None
        self._rendezvous_store: Any = None
        """The store in which the threads find each other."""
        self._generation = 0
        self._aborted = -1
        self._local_workers = workers_per_machine or config.parallel.world
        self._gpus = gpus or range(config.parallel.world)
        self._threads: list[WorkerThread] = []
        self._loads = QueuedLoads(config.parallel.world)

    def start(self, progress: Progress = lambda text: None) -> ExecutorLimits:
        progress(LOADING_LIBRARIES)
        prepare_for_torch()
        # Threads that import at the same time may see a partially imported module.
        import torch.distributed as dist

        import swell.worker.worker  # noqa: F401

        parallel = self._config.parallel
        self._rendezvous_store = dist.HashStore()  # type: ignore[attr-defined]

        def report(message: StartMessage) -> None:
            """Shows the weights of rank 0, because all shards have similar sizes. Any thread may be
            the one that compiles; the others wait for it."""
            if message.rank == 0 or isinstance(message, CompileProgress):
                progress(phase_text(message))

        try:
            for rank in range(parallel.world):
                place = (self._host, self._gpus[rank])
                self._threads.append(
                    WorkerThread(self._config, rank, self._local_workers, report, *place)
                )
            self._call_all("load")
            if parallel.expert:
                limit_s = self._config.cluster.start_timeout_s
                self._store = self._threads[0].call("open_store").result(limit_s)
            progress("forming groups")
            self.regroup(GroupPlan(generation=0))
            progress("measuring memory")
            limits = agree_limits(self._config, self._call_all("measure"))
            progress(ALLOCATING_CACHE)
            self._call_all("init_cache", *limits.of_cache)
        except BaseException as error:
            self.shutdown()
            if isinstance(error, ValueError):
                raise ConfigError(str(error)) from error
            raise
        return limits

    def execute(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        futures = [thread.call("execute_model", plan) for thread in self._threads]
        output_rank = self._config.parallel.world - self._config.parallel.tensor
        return InprocOutput(futures, output_rank, partial(self._abort, self._generation))

    def load_adapter(self, command: LoadAdapter) -> None:
        command = self._loads.begin(command)
        for thread in self._threads:
            thread.call("load_adapter", command, self._loads.queue.put)

    def loaded_adapters(self, wait_s: float) -> list[AdapterLoaded]:
        return self._loads.take(wait_s)

    def regroup(self, groups: GroupPlan) -> list[Regrouped]:
        self._generation += 1
        plan = msgspec.structs.replace(
            groups, generation=self._generation, secret=secrets.token_bytes()
        )
        futures = [thread.call("regroup", plan, self._rendezvous_store) for thread in self._threads]
        deadline = time.monotonic() + self._config.cluster.start_timeout_s
        while wait(futures, timeout=_POLL_S)[1] and time.monotonic() < deadline + _JOIN_S:
            late = time.monotonic() > deadline
            # Repeatedly: a worker that was just about to form its groups has missed the last abort.
            if late or has_failed(futures) or self._aborted >= self._generation:
                self.abort()
        raise_first(futures, self.abort)
        if any(not future.done() for future in futures):
            raise GroupBroken("the workers did not form their groups in time")
        return [future.result() for future in futures]

    def abort(self) -> None:
        self._abort(self._generation)

    def _abort(self, generation: int) -> None:
        """Lets all workers leave the groups of this generation."""
        self._aborted = max(self._aborted, generation)
        for thread in self._threads:
            thread.abort(generation)

    @property
    def store(self) -> tuple[str, int] | None:
        return self._store

    @property
    def progress_counter(self) -> int:
        return sum(thread.progress_counter for thread in self._threads)

    def workers(self) -> tuple[WorkerInfo, ...]:
        tensor = self._config.parallel.tensor
        return tuple(
            WorkerInfo(rank, rank % tensor, rank // tensor, os.getpid())
            for rank in range(len(self._threads))
        )

    def shutdown(self) -> None:
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.request_stop()
        for thread in threads:
            thread.join()

    def _call_all(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of all workers. Raises `ExecutorError` after `cluster.start_timeout_s`."""
        futures = [thread.call(method, *args) for thread in self._threads]
        limit_s = self._config.cluster.start_timeout_s
        wait(futures, timeout=limit_s, return_when=FIRST_EXCEPTION)
        missing = [rank for rank, future in enumerate(futures) if not future.done()]
        if missing and not has_failed(futures):
            self.abort()
            raise ExecutorError(
                f"workers {missing} did not finish `{method}` within "
                f"cluster.start_timeout_s={limit_s:g}"
            )
        raise_first(futures, self.abort)
        return [future.result() for future in futures]
