"""One engine: three verbs a step, and as many steps in flight as configured."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from swell.configs.schema import Config
from swell.engine.executor import Executor, ExecutorLimits
from swell.engine.scheduler import ScheduledStep, Scheduler
from swell.engine.wire import EngineCoreOutput, EngineCoreRequest
from swell.worker.wire import AsyncModelRunnerOutput

Outputs = dict[bytes, list[EngineCoreOutput]]
"""What a step gave, by the ingress that waits for it."""


class EngineCore:
    """Schedule, execute, update.

    Steps are submitted before the results of earlier ones are read, up to
    `scheduler.steps_in_flight`; results are read in the order of submission.
    """

    def __init__(self, config: Config, executor: Executor, limits: ExecutorLimits) -> None:
        self.config = config
        self.executor = executor
        self.limits = limits
        self.scheduler = Scheduler(
            config.scheduler,
            config.cache,
            limits.num_blocks,
            limits.max_model_len,
            limits.vocab_size,
        )
        self.num_steps = 0
        """Steps whose results were read: the measure of progress."""
        self._in_flight: deque[tuple[ScheduledStep, AsyncModelRunnerOutput]] = deque()

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self.scheduler.has_requests

    def add_request(self, request: EngineCoreRequest, client: bytes) -> EngineCoreOutput | None:
        """Queue a request; an answer means that it can never run."""
        return self.scheduler.add(request, client)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.scheduler.abort(request_ids)

    def step(self, intake: Callable[[], None] = lambda: None) -> Outputs:
        """Keep steps in flight, wait for the oldest, and return what it gave.

        `intake` is called between the wait and the update, so that an abort that arrived while
        the device computed holds for the tokens of that very step.
        """
        while len(self._in_flight) < self.config.scheduler.steps_in_flight:
            scheduled = self.scheduler.schedule()
            if scheduled is None:
                break
            self._in_flight.append((scheduled, self.executor.execute(scheduled.plan)))
        if not self._in_flight:
            return {}
        scheduled, future = self._in_flight.popleft()
        output = future.get_output()
        self.num_steps += 1
        intake()
        return self.scheduler.update(scheduled, output)

    def check_idle(self) -> None:
        """Raise AssertionError unless every block and slot is free and no step is in flight."""
        assert not self._in_flight, f"{len(self._in_flight)} steps are in flight"
        self.scheduler.check_idle()

    def shutdown(self) -> None:
        self.executor.shutdown()
