"""One engine: three verbs a step, and as many steps in flight as configured."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from swell.configs.schema import Config
from swell.coordinator.ground import THREADS, Ground, drive
from swell.coordinator.null_waves import NullMember
from swell.coordinator.wave_interface import EngineWaves
from swell.coordinator.waves import WaveMember
from swell.coordinator.wire import CoordinatorMessage
from swell.engine.executor import Executor, ExecutorLimits, WorkerLost
from swell.engine.request import Request
from swell.engine.scheduler import ScheduledStep, Scheduler
from swell.engine.wire import EngineCoreOutput, EngineCoreRequest
from swell.worker.wire import AsyncModelRunnerOutput, GroupPlan, Regrouped

Outputs = dict[bytes, list[EngineCoreOutput]]
"""The outputs of a step, by the ingress that waits for them."""


class EngineCore:
    """Schedule, execute, update.

    Steps are submitted before the results of earlier ones are read, up to
    `scheduler.steps_in_flight`, where the executor overlaps them; results are read in the order
    of submission.
    """

    def __init__(
        self,
        config: Config,
        executor: Executor,
        limits: ExecutorLimits,
        clock: Callable[[], float] = THREADS.now,
    ) -> None:
        """`clock`: seconds by a monotonic clock."""
        depth = config.scheduler.steps_in_flight if executor.overlaps else 1
        kind = WaveMember if config.parallel.expert else NullMember
        self.wave_member: EngineWaves = kind(rank=0, incarnation=0, depth=depth)
        """Decides when to step; its messages are collected for `take_messages`."""
        self.num_dummy_steps = 0
        self.num_waves = 0
        self.sync_s = 0.0
        """Time that steps waited for other engines."""
        self._messages: list[CoordinatorMessage] = []
        self._failed: list[Outputs] = []
        self.config = config
        self.executor = executor
        self.limits = limits
        self._clock = clock
        self.scheduler = self._new_scheduler()
        self.on_start: Callable[[dict[bytes, list[Request]]], None] = lambda started: None
        """Called with the requests that take their slots with a step, by ingress, before it is
        executed."""
        self.num_steps = 0
        """Steps whose results were read: the measure of progress."""
        self._in_flight: deque[tuple[ScheduledStep, AsyncModelRunnerOutput]] = deque()

    @property
    def progress(self) -> int:
        """Grows with every step and every layer; from any thread."""
        return self.num_steps + self.executor.progress_counter

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        if self._in_flight:
            return True
        return self.wave_member.may_submit() and (
            self.wave_member.lockstep or self.scheduler.has_requests
        )

    def add_request(self, request: EngineCoreRequest, client: bytes) -> EngineCoreOutput | None:
        """Queue a request; an answer means that it can never run."""
        answer = self.scheduler.add(request, client)
        if answer is None:
            self._messages += self.wave_member.work_arrived()
        return answer

    def take_failed(self) -> list[Outputs]:
        """Outputs of requests that ended because workers were lost."""
        failed, self._failed = self._failed, []
        return failed

    def take_messages(self) -> list[CoordinatorMessage]:
        """Messages for the coordinator."""
        messages, self._messages = self._messages, []
        return messages

    def abort_requests(self, request_ids: list[str], attempts: Iterable[int] = ()) -> None:
        """See `Scheduler.abort`."""
        self.scheduler.abort(request_ids, attempts)

    def abort_client(self, client: bytes) -> list[Request]:
        """Drop all requests of one ingress, and return them."""
        dropped = [r for r in self.scheduler.requests.values() if r.client == client]
        self.scheduler.abort([request.request_id for request in dropped])
        return dropped

    def step(self) -> Outputs:
        """`step_on` this thread."""
        return drive(self.step_on(THREADS))

    async def step_on(
        self, ground: Ground, process_inputs: Callable[[], Awaitable[None]] | None = None
    ) -> Outputs:
        """Keep steps in flight, wait for the oldest, and return what it gave.

        `process_inputs` is called between the wait and the update, so that an abort that arrived
        while the device computed holds for the tokens of that very step. What the executor raises
        is raised, and the steps in flight are lost.
        """
        try:
            self._submit()
            if not self._in_flight:
                return {}
            scheduled, future = self._in_flight.popleft()
            output = await ground.result(future)
        except Exception as error:
            if isinstance(error, WorkerLost):
                self._failed.append(self.scheduler.count_failed_attempt())
            self.discard_steps_in_flight()
            raise
        except BaseException:  # an interrupt inside of the scheduler needs a `reset`
            with contextlib.suppress(Exception):
                self.discard_steps_in_flight()
            raise
        self.num_steps += 1
        self.sync_s += output.sync_s
        if process_inputs is not None:
            await process_inputs()
        outputs = self.scheduler.update(scheduled, output)
        wave = self.wave_member.wave
        has_work = self.scheduler.has_requests
        self._messages += self.wave_member.on_all_reduce(output.working, output.pausing, has_work)
        self.num_waves += self.wave_member.wave != wave
        return outputs

    def _submit(self) -> None:
        """Hand out steps until enough are in flight. Engines that share experts hand out steps
        without rows too, while one of them has work."""
        while self.wave_member.may_submit():
            scheduled = self.scheduler.schedule()
            if self.wave_member.lockstep:
                scheduled = self._in_lockstep(scheduled or self.scheduler.schedule_dummy())
            elif scheduled is None:
                return
            if scheduled.plan.new_rows:
                self.on_start(scheduled.started())
            self.wave_member.submitted()
            self._in_flight.append((scheduled, self.executor.execute(scheduled.plan)))

    def _in_lockstep(self, scheduled: ScheduledStep) -> ScheduledStep:
        """The step with what the other engines must know."""
        self.num_dummy_steps += not scheduled.plan.slots
        plan = msgspec.structs.replace(
            scheduled.plan,
            epoch=self.wave_member.epoch,
            work=self.scheduler.wants_step,
            pause=self.wave_member.voting,
        )
        return ScheduledStep(plan, scheduled.rows)

    def discard_steps_in_flight(self) -> None:
        """Steps in flight and the KV cache are lost: every request starts again from the tokens
        that were read."""
        self._in_flight.clear()
        self.wave_member.in_flight = 0
        self.scheduler.preempt_all()

    def regroup(self, groups: GroupPlan) -> list[Regrouped]:
        """Let the workers form the groups of the plan (see `Executor.regroup`).

        With `keep_states` the caller has read the results of all steps.
        """
        if groups.keep_states:
            assert not self._in_flight, f"{len(self._in_flight)} steps are in flight"
        else:
            self.discard_steps_in_flight()
        return self.executor.regroup(groups)

    def reset(self) -> None:
        """Forget every request and all that is cached, whatever an interrupt has left half done:
        also a step that some workers have begun and others have not."""
        self._in_flight.clear()
        self.wave_member.in_flight = 0
        self._messages.clear()
        self._failed.clear()
        self.scheduler = self._new_scheduler()
        self.executor.abort()
        self.executor.regroup(GroupPlan(generation=0))

    def _new_scheduler(self) -> Scheduler:
        config, limits = self.config, self.limits
        return Scheduler(
            config.scheduler,
            config.cache,
            limits.num_blocks,
            limits.max_model_len,
            limits.vocab_size,
            self._clock,
        )

    def check_idle(self) -> None:
        """Raise AssertionError unless every block and slot is free and no step is in flight."""
        assert not self._in_flight, f"{len(self._in_flight)} steps are in flight"
        self.scheduler.check_idle()

    def shutdown(self) -> None:
        self.executor.shutdown()
