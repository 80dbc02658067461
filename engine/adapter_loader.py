"""Loads the adapters that requests wait for, and passes these requests on to the scheduler."""

from __future__ import annotations

from collections.abc import Callable

from swell.engine.adapter_admission import AdapterAdmission, Failed, shown_to_users
from swell.engine.executor import Executor
from swell.engine.scheduling.scheduler import Scheduler
from swell.engine.scheduling.step_builder import StartedRequest
from swell.engine.wire import EngineCoreOutput, FinishReason, OutputsByClient
from swell.worker.wire import AdapterLoaded

_ADAPTER_WAIT_S = 0.01
"""How long an otherwise idle engine waits for an adapter before it reads its messages."""


class AdapterLoader:
    """Executes what `AdapterAdmission` decides."""

    def __init__(
        self,
        admission: AdapterAdmission,
        executor: Executor,
        clock: Callable[[], float],
        on_failed: Callable[[OutputsByClient], None],
    ) -> None:
        """`on_failed` is called with the outputs of requests that fail."""
        self._admission, self._executor = admission, executor
        self._clock, self._on_failed = clock, on_failed
        self.num_polls = 0

    def poll(
        self,
        scheduler: Scheduler,
        on_start: Callable[[list[StartedRequest]], None],
        *,
        is_idle: bool,
    ) -> None:
        """Starts pending loads, and queues the requests whose adapters are loaded. `on_start` is
        called with the requests whose adapters are about to be loaded. `is_idle`: there is no step
        to compute, so it waits briefly for a load."""
        self.num_polls += 1
        admission, now = self._admission, self._clock()
        self._process_loaded(scheduler, _ADAPTER_WAIT_S if is_idle else 0.0)
        # Results first: they may have waited until a request needs the adapter again.
        expired = admission.expire(now)
        for held in admission.advance(lambda: _adapters_in_use(scheduler), now):
            answer = scheduler.add(held.request, held.client, held.arrived_s)
            if answer is not None:
                self._on_failed({held.client: [answer]})
        commands = admission.take_commands()
        if commands:
            on_start(admission.waiting_for(commands))
        for command in commands:
            self._executor.load_adapter(command)
        self._fail(expired)

    def on_repaired(self, scheduler: Scheduler) -> None:
        """Handles load results that have arrived, and restarts the loads in progress."""
        self._process_loaded(scheduler, 0.0)
        self.count_failed_attempt()

    def count_failed_attempt(self) -> None:
        """Counts the loss of a worker, and restarts the loads in progress."""
        self._fail(self._admission.count_failed_attempt())

    def _process_loaded(self, scheduler: Scheduler, wait_s: float) -> None:
        """Handles load results. If a replacement worker fails to load an adapter, requests that
        already run with it fail."""
        results: list[AdapterLoaded] = self._executor.loaded_adapters(wait_s)
        for loaded in results:
            self._fail(self._admission.on_loaded(loaded))
            if loaded.failure:
                self._on_failed(scheduler.fail_adapter(loaded.digest, loaded.failure))

    def _fail(self, requests: list[Failed]) -> None:
        for failed in requests:
            request = failed.held.request
            reason = shown_to_users(failed.reason, request.adapter)
            answer = EngineCoreOutput(
                request.request_id, [], FinishReason.ERROR, reason, attempt=request.attempt
            )
            self._on_failed({failed.held.client: [answer]})


def _adapters_in_use(scheduler: Scheduler) -> set[str]:
    """Returns the digests of the adapters of the scheduler's requests."""
    requests = scheduler.requests.values()
    return {r.core.adapter.digest for r in requests if r.core.adapter is not None}
