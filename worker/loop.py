"""The worker's side of its engine's two channels: one for steps, and one that no step blocks.

The protocol: the worker sends `WorkerHello`. At the engine's start, `Regroup`, `MeasureMemory` and
`InitCache` follow, each after all workers have answered the one before; at the start of a
replacement, only `InitCache`. Then the engine sends plans and sometimes a `Regroup`.
If a command raises, the worker sends `WorkerFailure`, leaves its groups, drops pending
results, and ignores plans until the next `Regroup`: the engine sent these plans before it received
the failure. On the second channel the worker sends heartbeats and receives `AbortGroups`, which
aborts an operation whose peers do not join.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from typing import Any

from swell.configs.runtime.flight_recorder import recorder
from swell.configs.runtime.process import exit_on_error
from swell.configs.runtime.waker import Waker
from swell.coordinator.transport.channel import Outlet
from swell.worker.comm.groups import GroupError
from swell.worker.wire import (
    AbortGroups,
    AdapterLoaded,
    AsyncModelRunnerOutput,
    CacheReady,
    GroupPlan,
    InitCache,
    LoadAdapter,
    MeasureMemory,
    MemoryMeasured,
    Regroup,
    SchedulerOutput,
    Shutdown,
    WorkerCommand,
    WorkerFailure,
    WorkerHeartbeat,
    WorkerHello,
)


class WorkerLoop:
    """Executes the commands of the first channel on the thread that calls `run`."""

    def __init__(
        self, rank: int, worker: Any, outlet: Outlet[WorkerCommand], generation: int = 0
    ) -> None:
        """`generation`: that of the engine's groups when the worker starts."""
        self._rank = rank
        self._worker = worker
        self._outlet = outlet
        self._pending_outputs: deque[tuple[int, AsyncModelRunnerOutput]] = deque()
        self._step = 0
        self._failed = False
        self._generation = generation
        self._loaded: queue.SimpleQueue[AdapterLoaded] = queue.SimpleQueue()
        self._waker: Waker | None = None
        """Interrupts the wait for commands when an adapter is loaded."""
        self._aborted = -1
        """Groups of this generation and older ones are aborted."""

    def heartbeat(self) -> WorkerHeartbeat:
        """Returns the worker's progress. May be called from any thread."""
        return WorkerHeartbeat(self._rank, self._worker.progress_counter, self._generation)

    def run(self) -> None:
        """Executes plans until `Shutdown`.

        The loop waits for a result only if no plan can be started, so that the device is never idle
        because the host waits.
        """
        self._outlet.send(WorkerHello(self._rank))
        while True:
            command = self._outlet.receive(0.0 if self._pending_outputs else None, self._waker)
            while not self._loaded.empty():
                self._outlet.send(self._loaded.get())
            if isinstance(command, Shutdown):
                return
            try:
                self._handle(command)
            except Exception as error:
                self._fail(error)

    def abort(self, generation: int) -> None:
        """Aborts the groups of `generation` and older ones. Call it from a single other thread."""
        self._aborted = max(self._aborted, generation)
        self.reabort()

    def reabort(self) -> None:
        """Repeats the abort: a call of `abort` misses groups that are being formed meanwhile. Call
        it from the thread that calls `abort`."""
        if self._aborted >= self._generation:
            self._worker.abort(self._aborted)

    def poll_groups(self) -> None:
        """Aborts the groups if a peer is known to have failed. May be called from any thread."""
        self._worker.poll_groups()

    def _handle(self, command: WorkerCommand | None) -> None:
        match command:
            case None if self._pending_outputs:
                self._step, output = self._pending_outputs.popleft()
                self._outlet.send(output.get_output())
                recorder().note(f"result of step {self._step} sent")
            case SchedulerOutput() if not self._failed:
                self._step = command.step
                recorder().note(f"step {command.summary}")
                started = self._worker.execute_model(command)
                if started is not None:
                    self._pending_outputs.append((command.step, started))
            case Regroup():
                self._regroup(command.plan)
            case LoadAdapter():
                self._load_adapter(command)
            case MeasureMemory() if not self._failed:
                self._measure()
            case InitCache() if not self._failed:
                sizes = command.num_blocks, command.max_model_len, command.offload_blocks
                self._worker.init_cache(*sizes)
                self._outlet.send(CacheReady(self._rank))

    def _load_adapter(self, command: LoadAdapter) -> None:
        waker = self._waker = self._waker or Waker()

        def on_loaded(loaded: AdapterLoaded) -> None:
            self._loaded.put(loaded)
            waker.wake()

        self._worker.load_adapter(command, on_loaded)

    def _measure(self) -> None:
        try:
            measured = MemoryMeasured(self._rank, self._worker.measure())
        except ValueError as error:
            measured = MemoryMeasured(self._rank, None, str(error))
        self._outlet.send(measured)
        if measured.limits is None:
            self._worker.abort()  # peers may wait for this worker in a collective

    def _regroup(self, plan: GroupPlan) -> None:
        self._pending_outputs.clear()
        self._generation = plan.generation
        recorder().note(f"forming groups, generation {plan.generation}")
        regrouped = self._worker.regroup(plan)
        recorder().note(f"groups formed, generation {plan.generation}")
        self._failed = False
        self._outlet.send(regrouped)

    def _fail(self, error: Exception) -> None:
        self._failed = True
        self._pending_outputs.clear()
        text = f"{type(error).__name__}: {error}"
        recorder().note(f"step {self._step} failed: {text}")
        group = isinstance(error, GroupError)
        absent = list(error.absent) if isinstance(error, GroupError) else []
        self._outlet.send(
            WorkerFailure(self._step, self._rank, text, group, self._generation, absent)
        )
        self._worker.abort()


class HeartbeatThread:
    """Sends heartbeats, handles `AbortGroups` on the second channel and asks the groups for failed
    peers, on a separate thread. Nothing here waits for a device or a peer."""

    def __init__(
        self, loop: WorkerLoop, outlet: Outlet[WorkerCommand], heartbeat_interval_s: float
    ) -> None:
        """Takes ownership of `outlet`: the thread uses and closes it."""
        self._loop = loop
        self._outlet = outlet
        self._heartbeat_interval_s = heartbeat_interval_s
        self._waker = Waker()
        self._ending = False
        run = exit_on_error(self._run, "worker heartbeat")
        self._thread = threading.Thread(target=run, name="swell-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread. A last heartbeat reports the final progress counter."""
        self._ending = True
        self._waker.wake()
        self._thread.join()
        self._waker.close()

    def _run(self) -> None:
        while not self._ending:
            self._outlet.send(self._loop.heartbeat())
            command = self._outlet.receive(self._heartbeat_interval_s, self._waker)
            if isinstance(command, AbortGroups):
                self._loop.abort(command.generation)
            else:
                self._loop.reabort()
            self._loop.poll_groups()
        self._outlet.close()
