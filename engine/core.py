"""The core of an engine: schedules, executes and updates, with several steps in flight."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from swell.configs.runtime.flight_recorder import recorder
from swell.configs.schema import Config
from swell.coordinator.transport.runtime import THREADS, Runtime, drive
from swell.coordinator.wave_protocol.null_waves import NullMember
from swell.coordinator.wave_protocol.wave_interface import EngineWaves
from swell.coordinator.wave_protocol.waves import WaveMember
from swell.coordinator.wire import CoordinatorMessage
from swell.engine.adapter_admission import AdapterAdmission
from swell.engine.adapter_loader import AdapterLoader
from swell.engine.executor import Executor, ExecutorLimits, WorkerLost
from swell.engine.executor.worker_memory import WorkerMemory
from swell.engine.kv.handover_files import make_claim
from swell.engine.kv.handover_reads import ReadsOfFiles
from swell.engine.kv.kv_cache_manager import KVCacheManager
from swell.engine.request import Request
from swell.engine.scheduling.drafter import make_drafter
from swell.engine.scheduling.request_validation import invalid_reason, wrong_kind
from swell.engine.scheduling.scheduler import Scheduler
from swell.engine.scheduling.step_builder import ScheduledStep, StartedRequest
from swell.engine.wire import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    OutputsByClient,
)
from swell.worker.wire import AsyncModelRunnerOutput, GroupPlan, Regrouped

OnStart = Callable[[list[StartedRequest]], None]
"""Called before a step is executed, with the requests that get their slots in it, and before an
adapter is loaded, with the requests that wait for it."""


def ignore_started(started: list[StartedRequest]) -> None:
    """Reports nothing, for a caller in the same process."""


class EngineCore:
    """Schedules, executes, and updates requests.

    Steps are submitted before the results of earlier ones are read, up to
    `scheduler.steps_in_flight`, if the executor overlaps them. Results are read in the order of
    submission.
    """

    def __init__(
        self,
        config: Config,
        executor: Executor,
        limits: ExecutorLimits,
        clock: Callable[[], float] = THREADS.now,
    ) -> None:
        """`clock`: seconds by a monotonic clock."""
        self._depth = config.scheduler.steps_in_flight if executor.overlaps else 1
        self.wave_member = _new_wave_member(config, self._depth, rank=0, incarnation=0)
        """Decides when to step; `take_messages` returns its messages."""
        self.num_dummy_steps = 0
        self.num_waves = 0
        self.sync_s = self.expert_imbalance = 0.0
        """`sync_s`: total time that steps waited for other engines."""
        self._messages: list[CoordinatorMessage] = []
        self._failed: list[OutputsByClient] = []
        self.config = config
        self.executor = executor
        self.limits = limits
        self._clock = clock
        self._reads = ReadsOfFiles(clock)
        self.scheduler = self._new_scheduler()
        self.adapters = AdapterAdmission(config.lora)
        """Requests whose adapters are not loaded; the scheduler has all others."""
        self._adapter_loader = AdapterLoader(self.adapters, executor, clock, self._failed.append)
        self.memory = WorkerMemory(executor, config.model.path, self.discard_steps_in_flight)
        self.num_steps = 0
        """Number of steps whose results were read: the measure of progress."""
        self._in_flight: deque[tuple[ScheduledStep, AsyncModelRunnerOutput]] = deque()

    @property
    def progress(self) -> int:
        """Increases with every step and every layer; may be called from any thread."""
        return self.num_steps + self.executor.progress_counter + self._adapter_loader.num_polls

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        if self._in_flight or self.adapters.num_held:
            return True
        return self.wave_member.may_submit() and (
            self.wave_member.lockstep or self.scheduler.has_requests
        )

    def add_request(self, request: EngineCoreRequest, client: bytes) -> EngineCoreOutput | None:
        """Queues a request. Returns an output only if the request finishes at once or can never
        run."""
        samples, records = self.limits.samples, self.config.model.routed_experts
        error = wrong_kind(request, samples=samples, records_experts=records)
        error = error or self.adapters.refusal(request)
        if error:
            reason = FinishReason.ERROR
            return EngineCoreOutput(request.request_id, [], reason, error, attempt=request.attempt)
        if request.adapter is not None and self._is_valid(request):
            self.adapters.abort([request.request_id], [request.attempt - 1])
            if self.adapters.hold(request, client, self._clock()):
                return None
        answer = self.scheduler.add(request, client)
        if answer is None:
            self._messages += self.wave_member.work_arrived()
        return answer

    def _is_valid(self, request: EngineCoreRequest) -> bool:
        """Whether the request is valid. An invalid one need not wait for an adapter: the scheduler
        answers it."""
        limits = self.limits
        return invalid_reason(request, limits.vocab_size, limits.max_model_len) is None

    def take_failed(self) -> list[OutputsByClient]:
        """Returns and clears outputs of requests that failed outside of a step."""
        failed = self._failed.copy()
        self._failed.clear()
        return failed

    def take_messages(self) -> list[CoordinatorMessage]:
        """Returns and clears the messages for the coordinator."""
        messages, self._messages = self._messages, []
        return messages

    def abort_requests(self, request_ids: list[str], attempts: Iterable[int] = ()) -> None:
        """See `Scheduler.abort`."""
        self.adapters.abort(request_ids, attempts)
        self.scheduler.abort(request_ids, attempts)

    def abort_client(self, client: bytes) -> list[Request | EngineCoreRequest]:
        """Drops all requests of one ingress, and returns them."""
        dropped = [r for r in self.scheduler.requests.values() if r.client == client]
        self.scheduler.abort([request.request_id for request in dropped])
        return [*dropped, *self.adapters.abort_client(client)]

    def join_cluster(self, rank: int, incarnation: int) -> None:
        """Takes the place of an engine in a cluster, before its first step there."""
        self.wave_member = _new_wave_member(self.config, self._depth, rank, incarnation)

    def step(self, on_start: OnStart = ignore_started) -> OutputsByClient:
        """Runs `step_on` on this thread."""
        return drive(self.step_on(THREADS, on_start=on_start))

    async def step_on(
        self,
        runtime: Runtime,
        process_inputs: Callable[[], Awaitable[None]] | None = None,
        on_start: OnStart = ignore_started,
    ) -> OutputsByClient:
        """Keeps steps in flight, waits for the oldest one, and returns its outputs.

        `process_inputs` is called between the wait and the update, so that an abort that arrives
        while the device computes applies to the tokens of that very step. Exceptions of the
        executor are raised, and then the steps in flight are lost.
        """
        try:
            if self.adapters.num_held:
                await runtime.run(self._poll_adapters, on_start)
            self._submit(on_start)
            if not self._in_flight:
                return self._with_failed({})
            scheduled, future = self._in_flight.popleft()
            output = await runtime.result(future)
        except Exception as error:
            if isinstance(error, WorkerLost):
                self._failed.append(self.scheduler.count_failed_attempt())
                self._adapter_loader.count_failed_attempt()
            self.discard_steps_in_flight()
            raise
        except BaseException:  # an interrupt inside the scheduler needs a `reset`
            with contextlib.suppress(Exception):
                self.discard_steps_in_flight()
            raise
        self.num_steps += 1
        self._reads.on_result(scheduled.plan)
        self.sync_s += output.sync_s
        self.expert_imbalance = output.imbalance or self.expert_imbalance
        if process_inputs is not None:
            await process_inputs()
        outputs = self.scheduler.update(scheduled, output)
        wave = self.wave_member.wave
        has_work = self.scheduler.has_requests
        self._messages += self.wave_member.on_all_reduce(output.working, output.pausing, has_work)
        self.num_waves += self.wave_member.wave != wave
        return self._with_failed(outputs)

    def _poll_adapters(self, on_start: OnStart) -> None:
        has_step = self.scheduler.has_requests and self.wave_member.may_submit()
        is_idle = not self._in_flight and not has_step
        self._adapter_loader.poll(self.scheduler, on_start, is_idle=is_idle)

    def on_repaired(self) -> None:
        """Restarts what lost workers had not finished outside of steps."""
        self._adapter_loader.on_repaired(self.scheduler)

    def _with_failed(self, outputs: OutputsByClient) -> OutputsByClient:
        """Adds the outputs of requests that failed without a step to those of a step."""
        for failed in self.take_failed() if self._failed else ():
            for client, answers in failed.items():
                outputs.setdefault(client, []).extend(answers)
        return outputs

    def _submit(self, on_start: OnStart) -> None:
        """Submits steps until enough are in flight. In lockstep, steps without rows are submitted
        too, while one of the engines has work."""
        while self.wave_member.may_submit():
            scheduled = self.scheduler.schedule()
            if self.wave_member.lockstep:
                scheduled = self._in_lockstep(scheduled or self.scheduler.schedule_dummy())
            elif scheduled is None:
                return
            if scheduled.plan.new_requests:
                on_start(scheduled.started())
            self.wave_member.submitted()
            self._reads.on_plan(scheduled.plan)
            recorder().note(f"plan {scheduled.plan.summary}")
            self._in_flight.append((scheduled, self.executor.execute(scheduled.plan)))

    def _in_lockstep(self, scheduled: ScheduledStep) -> ScheduledStep:
        """Adds to a step what the other engines must know."""
        self.num_dummy_steps += not scheduled.plan.slots
        plan = msgspec.structs.replace(
            scheduled.plan,
            epoch=self.wave_member.epoch,
            work=self.scheduler.wants_step,
            pause=self.wave_member.voting,
        )
        return ScheduledStep(plan, scheduled.rows)

    def discard_steps_in_flight(self) -> None:
        """Drops the steps in flight and the KV cache: every request restarts from the tokens that
        were read."""
        self._in_flight.clear()
        self._reads.on_loss()
        self.wave_member.discard_steps()
        self.scheduler.preempt_all()

    def regroup(self, groups: GroupPlan) -> list[Regrouped]:
        """Lets the workers form the groups of the plan (see `WorkerMemory.regroup`).

        With `keep_states` the caller has read the results of all steps.
        """
        in_flight = len(self._in_flight)
        assert not (groups.keep_states and in_flight), f"{in_flight} steps are in flight"
        return self.memory.regroup(groups)

    def reload(self, path: str) -> None:
        """Drops all requests and caches, for another server, and loads the weights of this folder
        into all workers. Sleeping workers wake up. Raises like `WorkerMemory.update_weights`."""
        self._forget()
        self.memory.wake_with_next_regroup()
        self.memory.update_weights(path)

    def reset(self) -> None:
        """Drops all requests and caches, even if an interrupt has left a step that only some
        workers have started."""
        self._forget()
        self.executor.abort()
        self.regroup(GroupPlan(generation=0))

    def _forget(self) -> None:
        self._in_flight.clear()
        self.wave_member.discard_steps()
        self._messages.clear()
        self._failed.clear()
        self.adapters.clear()
        self.scheduler = self._new_scheduler()

    def _new_scheduler(self) -> Scheduler:
        config, limits = self.config, self.limits
        cache = config.cache
        if not limits.keeps_kv:  # a block holds nothing for a later request
            cache = msgspec.structs.replace(cache, prefix_caching=False)
        offload_blocks = limits.offload_blocks if cache.prefix_caching else ()
        claim_file = self._reads.limit(make_claim(config))
        return Scheduler(
            config.scheduler,
            KVCacheManager(cache, limits.num_blocks, offload_blocks, claim_file),
            limits.max_model_len,
            limits.vocab_size,
            self._clock,
            whole_prompts=not limits.keeps_kv,
            drafter=make_drafter(config.drafts, limits.max_model_len, self._depth),
        )

    def check_idle(self) -> None:
        """Raises AssertionError unless every block and slot is free and no step is in flight."""
        assert not self._in_flight, f"{len(self._in_flight)} steps are in flight"
        assert not self.adapters.num_held, f"{self.adapters.num_held} requests wait for adapters"
        self.scheduler.check_idle()

    def shutdown(self) -> None:
        self.executor.shutdown()


def _new_wave_member(config: Config, depth: int, rank: int, incarnation: int) -> EngineWaves:
    kind = WaveMember if config.parallel.expert else NullMember
    return kind(rank, incarnation, depth)
