"""Runs the one worker of an engine on the engine's own thread: no queue, no thread to wake.

A CPU computes the step inside `execute`. On a GPU, `execute` only launches the kernels, so that the
next step is prepared while the device computes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

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
    GroupPlan,
    LoadAdapter,
    ModelRunnerOutput,
    Regrouped,
    SchedulerOutput,
    StartMessage,
)


class InlineOutput(AsyncModelRunnerOutput):
    """A step's result; waiting for it may fail like the step itself."""

    def __init__(self, executor: InlineExecutor, output: AsyncModelRunnerOutput) -> None:
        self._executor = executor
        self._output = output

    def get_output(self) -> ModelRunnerOutput:
        output: ModelRunnerOutput = self._executor.guard(self._output.get_output)
        return output


class InlineExecutor(Executor):
    """Calls its worker. Not thread-safe, except `abort` and `progress_counter`."""

    def __init__(
        self,
        config: Config,
        *,
        workers_per_machine: int = 1,
        host: str = "127.0.0.1",
        gpus: Sequence[int] = (),
        **_shell: Any,
    ) -> None:
        """`host`: address at which workers of other engines can reach this process. `gpus`: torch's
        indices of the GPUs of this process; the worker uses the first one."""
        self._config = config
        self._host = host
        self._local_workers = workers_per_machine
        self._gpu = gpus[0] if gpus else 0
        self._worker: Any = None
        self._group_error: Any = ()
        self._store: tuple[str, int] | None = None
        self._generation = 0
        self._broken = False
        self._failure: BaseException | None = None
        self._loads = QueuedLoads(workers=1)

    def start(self, progress: Progress = lambda text: None) -> ExecutorLimits:
        progress(LOADING_LIBRARIES)
        prepare_for_torch()
        from swell.worker.worker import GroupError, Worker  # type: ignore[attr-defined]

        self._group_error = GroupError

        def report(message: StartMessage) -> None:
            progress(phase_text(message))

        try:
            self._worker = Worker(
                self._config, 0, self._local_workers, self._gpu, report, self._host
            )
            self._worker.load()
            if self._config.parallel.expert:
                self._store = self._worker.open_store()
            self.regroup(GroupPlan(generation=0))
            progress("measuring memory")
            limits = agree_limits(self._config, [self._worker.measure()])
            progress(ALLOCATING_CACHE)
            self._worker.init_cache(*limits.of_cache)
        except BaseException as error:
            self.shutdown()
            if isinstance(error, ValueError):
                raise ConfigError(str(error)) from error
            raise
        return limits

    @property
    def overlaps(self) -> bool:
        return self._worker is not None and self._worker.device.type != "cpu"

    def execute(self, plan: SchedulerOutput) -> AsyncModelRunnerOutput:
        if self._broken:
            raise GroupBroken("the step was planned before its groups failed")
        return InlineOutput(self, self.guard(self._worker.execute_model, plan))

    def load_adapter(self, command: LoadAdapter) -> None:
        command = self._loads.begin(command)
        self.guard(self._worker.load_adapter, command, self._loads.queue.put)

    def loaded_adapters(self, wait_s: float) -> list[AdapterLoaded]:
        return self._loads.take(wait_s)

    def regroup(self, groups: GroupPlan) -> list[Regrouped]:
        self._generation += 1
        plan = msgspec.structs.replace(groups, generation=self._generation)
        regrouped = self.guard(self._worker.regroup, plan)
        self._broken = False
        return [regrouped]

    def guard(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls the worker. After a group failure it can form a new group; after any other failure
        it cannot be used."""
        if self._failure is not None:
            raise ExecutorError(f"the worker has already failed: {self._failure}")
        try:
            return call(*args)
        except self._group_error as error:
            self._broken = True
            self._worker.abort()
            raise GroupBroken(f"worker 0: {error}", error.absent) from error
        except Exception as error:
            self._failure = error
            self._worker.shutdown()
            raise
        except BaseException:  # the user's interrupt: drop what the step had begun
            if call != self._worker.regroup:  # the caller regroups again, perhaps with another plan
                self._worker.regroup(GroupPlan(self._generation))
            raise

    def abort(self) -> None:
        if self._worker is not None:
            self._worker.abort(self._generation)

    @property
    def store(self) -> tuple[str, int] | None:
        return self._store

    @property
    def progress_counter(self) -> int:
        return self._worker.progress_counter if self._worker is not None else 0

    def workers(self) -> tuple[WorkerInfo, ...]:
        return (WorkerInfo(0, 0, 0, os.getpid()),)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
