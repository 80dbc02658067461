"""Decides what the next step computes.

There is no prefill phase and no decode phase. Each request has known tokens and computed tokens. A
step lets the computed tokens catch up with the known ones, request by request in policy order,
until the token budget or the blocks are used up. Chunked prefill, a cached prefix, a preempted
request that restarts, and a request handed over by another engine all follow this one rule. A row
whose computed tokens reach its known tokens samples the next one.

A prefix that requests share is computed once. If the next missing block of a waiting request is
being computed for a request ahead of it, its *prefix leader*, it waits: until their tokens differ
or the leader finishes. Then it finds the blocks in the cache. Later requests may start meanwhile,
but a slot and the blocks that it will need stay reserved. When waiting requests are scheduled,
every running one with uncomputed tokens has a row in the step. So a leader makes progress, and no
request waits for one that is later in policy order.

Steps may be scheduled before the results of earlier ones are read. A token that such a step samples
is `pending`: it exists on the device and counts as known, but the host does not know it yet.

A row may have drafts after its tokens (`drafter.py`). How many of them are accepted is known when
the step is read; until then the request is in no other step.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, zip_longest

from msgspec.structs import replace

from swell.configs.scheduler import SchedulerConfig
from swell.coordinator.transport.runtime import THREADS
from swell.engine.adapter_admission import shown_to_users
from swell.engine.kv.kv_cache_manager import KVCacheManager, PrefixLeader
from swell.engine.request import MAX_FAILED_ATTEMPTS, Request, RequestStatus
from swell.engine.scheduling.drafter import Drafter
from swell.engine.scheduling.multi_step import add_passes
from swell.engine.scheduling.request_validation import invalid_reason
from swell.engine.scheduling.step_builder import ScheduledStep, StepBuilder
from swell.engine.wire import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    OutputsByClient,
)
from swell.worker.sampler_wire import Extra
from swell.worker.wire import ModelRunnerOutput, NewBlocks

NANS_IN_LOGITS = (
    "the model's logits for this request are NaN or infinite, so no token can be sampled"
)
_NO_EXTRAS: list[Extra] = []
_NO_TOKENS: list[int] = []
_Waiting = tuple[tuple[int, float, int], Request, PrefixLeader | None]
"""Place in policy order, the request, and its prefix leader when it was last considered."""


class Scheduler:
    """Requests of one engine. Pure: no process, no tensor, and a clock only for statistics."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        max_model_len: int,
        vocab_size: int,
        clock: Callable[[], float] = THREADS.now,
        whole_prompts: bool = False,
        drafter: Drafter | None = None,
    ) -> None:
        """`whole_prompts`: each prompt is computed in one step with room for all of it. `drafter`:
        None: no row has drafts."""
        self.config = config
        self.max_model_len = max_model_len
        self._whole_prompts = whole_prompts
        self.vocab_size = vocab_size
        self.kv = kv
        self.drafter = drafter or Drafter()
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        """In policy order: the last one is preempted first, and scheduled last."""
        self.num_preemptions = 0
        self.num_nans_in_logits = 0
        """Number of requests that failed because their logits were NaN or infinite."""
        self.num_started_requests = 0
        self.num_started_tokens = 0
        self._waiting: list[_Waiting] = []
        """Heap in policy order; finished requests are dropped when they surface."""
        self._free_slots = list(range(config.max_rows))
        chunk_tokens = 0 if whole_prompts else config.max_chunk_tokens
        self._max_chunk_tokens = chunk_tokens or config.max_tokens_per_step
        self._arrivals = self._step = 0
        self._clock = clock

    @property
    def num_waiting(self) -> int:
        return len(self.requests) - len(self.running)

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    @property
    def wants_step(self) -> bool:
        """Whether more must be computed after the scheduled steps."""
        return any(r.tokens_to_schedule or r.num_drafts for r in self.requests.values())

    def waiting_tokens(self) -> int:
        """Number of known tokens that are not computed, over all requests."""
        return sum(r.tokens_to_compute for r in self.requests.values())

    # ---------------------------------------------------------------- requests come and go

    def add(
        self, core: EngineCoreRequest, client: bytes, arrived_s: float | None = None
    ) -> EngineCoreOutput | None:
        """Adds a request that arrived now, or at `arrived_s` by the clock. Returns an output if it
        can never run or is complete. A later attempt replaces an earlier one, whose abort was
        lost."""
        self.abort([core.request_id], [core.attempt - 1])
        error = invalid_reason(core, self.vocab_size, self.max_model_len)
        if core.request_id in self.requests:
            error = f"request id {core.request_id!r} is already being served"
        if error:
            return EngineCoreOutput(
                core.request_id, [], FinishReason.ERROR, error, attempt=core.attempt
            )
        if len(core.output_token_ids) >= core.max_tokens > 0:
            return EngineCoreOutput(core.request_id, [], FinishReason.LENGTH, attempt=core.attempt)
        priority = core.priority if self.config.policy == "priority" else 0
        self._arrivals += 1
        arrived_s = self._clock() if arrived_s is None else arrived_s
        request = Request(core, client, priority, self._arrivals, arrived_s)
        self.requests[core.request_id] = request
        heapq.heappush(self._waiting, (request.order, request, None))
        return None

    def abort(self, request_ids: Iterable[str], attempts: Iterable[int] = ()) -> None:
        """Frees all resources of these requests now; tokens that steps in flight sample for them
        are dropped. `attempts`: the last attempt of each request to abort (default: any)."""
        for request_id, attempt in zip_longest(request_ids, attempts):
            request = self.requests.get(request_id)
            if request is not None and (attempt is None or request.attempt <= attempt):
                self._finish(request)

    def _finish(self, request: Request) -> None:
        if request.slot >= 0:
            self._release_slot(request)
        request.status = RequestStatus.FINISHED
        del self.requests[request.request_id]

    def _release_slot(self, request: Request) -> None:
        """Frees the slot and the blocks. Steps in flight may still access them: workers run steps
        in order, so the next owner writes later."""
        self.running.remove(request)
        self.kv.free(request)
        self._free_slots.append(request.slot)
        request.slot = -1
        request.drafts = None

    # ---------------------------------------------------------------- schedule

    def schedule(self) -> ScheduledStep | None:
        """Returns the next step, or None if nothing can be computed now."""
        builder = StepBuilder(self.config.max_tokens_per_step)
        self._schedule_running(builder)
        if self._waiting and not builder.preempted:
            self._schedule_waiting(builder)
        if not builder.rows:
            return None
        self.drafter.add_drafts(builder, len(self.running), self.kv)
        if (steps := self.config.steps_per_plan) > 1:
            add_passes(builder, steps, len(self.running), self.kv, self.max_model_len)
        return self._plan(builder)

    def schedule_dummy(self) -> ScheduledStep:
        """Returns a step without rows."""
        return self._plan(StepBuilder(0))

    def _plan(self, builder: StepBuilder) -> ScheduledStep:
        self._step += 1
        return builder.plan(self._step, self.kv)

    def _schedule_running(self, builder: StepBuilder) -> None:
        index = 0
        while index < len(self.running) and builder.budget_tokens:
            request = self.running[index]
            index += 1
            count = self._chunk(request, builder)
            if count == 0:
                continue
            end = request.computed + count
            if end > request.block_capacity_tokens:
                blocks = self._grow_or_preempt(request, end, builder)
                if blocks is None:
                    break
                builder.new_blocks.append(NewBlocks(request.slot, blocks))
            builder.add_row(request, count)

    def _schedule_waiting(self, builder: StepBuilder) -> None:
        followers: list[_Waiting] = []
        claimed_blocks = 0
        while self._waiting and builder.budget_tokens and len(followers) < len(self._free_slots):
            order, request, prefix_leader = self._waiting[0]
            if request.status is RequestStatus.FINISHED:
                heapq.heappop(self._waiting)
                continue
            # The last tokens of a preempted request may still be pending: the worker cannot get
            # them yet.
            if request.pending:
                break
            if request.failed_attempts and any(r.failed_attempts for r in self.running):
                followers.append((order, request, prefix_leader))
                heapq.heappop(self._waiting)
                continue
            prefix_leader = self.kv.wait_for_prefix(request, prefix_leader)
            if prefix_leader is not None:
                followers.append((order, request, prefix_leader))
                claimed_blocks += prefix_leader.own_blocks
            elif self._whole_prompts and len(request.token_ids) > builder.budget_tokens:
                break
            # Each running request may soon need a block.
            elif self.kv.admit(request, spare_blocks=len(self.running) + claimed_blocks):
                self._assign_slot(request, builder)
                builder.add_row(request, self._chunk(request, builder))
            else:
                break
            heapq.heappop(self._waiting)
        for follower in followers:
            heapq.heappush(self._waiting, follower)

    def _assign_slot(self, request: Request, builder: StepBuilder) -> None:
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        request.tokens_at_start = len(request.token_ids)
        insort(self.running, request, key=lambda r: r.order)
        request.scheduled_s = self._clock() - request.queued_at
        if request.queue_s < 0:
            request.queue_s = request.scheduled_s
            request.num_cached_tokens = min(request.computed, request.prompt_tokens)
            self.num_started_requests += 1
            self.num_started_tokens += request.total_tokens
        builder.add_new(request, self.vocab_size, self.config.steps_per_plan > 1)

    def _chunk(self, request: Request, builder: StepBuilder) -> int:
        """Returns how many tokens of `request` fit into this step, which has room for one."""
        count = request.tokens_to_schedule
        return count if count <= 1 else min(count, builder.budget_tokens, self._max_chunk_tokens)

    def _grow_or_preempt(
        self, request: Request, num_tokens: int, builder: StepBuilder
    ) -> list[int] | None:
        """Allocates blocks, preempting later requests if needed; None: preempted itself."""
        while True:
            blocks = self.kv.grow(request, num_tokens)
            if blocks is not None:
                return blocks
            victim = self.running[-1]
            self._preempt(victim)
            builder.preempted = True
            if victim is request:
                return None

    def _preempt(self, request: Request) -> None:
        """Frees slot and blocks; the request restarts later from the tokens known then."""
        self._release_slot(request)
        request.status = RequestStatus.WAITING
        request.computed = 0
        request.num_preemptions += 1
        request.preempted_s = self._clock() - request.queued_at
        self.num_preemptions += 1
        heapq.heappush(self._waiting, (request.order, request, None))

    def count_failed_attempt(self) -> OutputsByClient:
        """Counts the loss of a worker for running requests, which may be the cause. Those with too
        many such losses fail; returns their outputs for each ingress."""
        outputs: OutputsByClient = {}
        for request in self.running.copy():
            if len(request.token_ids) > request.tokens_at_start:
                continue  # it made progress
            request.failed_attempts += 1
            if request.failed_attempts >= MAX_FAILED_ATTEMPTS:
                lost = request.failed_attempts
                why = f"{lost} workers or engines in a row were lost in its steps"
                outputs.setdefault(request.client, []).append(request.fail(why))
                self._finish(request)
        return outputs

    def fail_adapter(self, digest: str, reason: str) -> OutputsByClient:
        """Fails requests whose adapter a worker has lost; returns outputs for each ingress."""
        outputs: OutputsByClient = {}
        for request in list(self.requests.values()):
            adapter = request.core.adapter
            if adapter is not None and adapter.digest == digest:
                why = shown_to_users(reason, adapter)
                self._finish(request)
                outputs.setdefault(request.client, []).append(request.fail(why))
        return outputs

    def preempt_all(self) -> None:
        """Drops all steps whose results were not read, and with them the KV cache.

        All requests wait again in their order and restart from the tokens that the host knows.
        Tokens that lost steps sampled are sampled again: their noise depends on seed and position.
        """
        for request in reversed(self.running.copy()):
            self._preempt(request)
        for request in self.requests.values():
            request.pending = request.num_drafts = 0
        self.kv.reset_prefix_cache()

    # ---------------------------------------------------------------- update

    def update(self, step: ScheduledStep, output: ModelRunnerOutput) -> OutputsByClient:
        """Processes the result of a step; returns outputs for each ingress."""
        plan = step.plan
        assert output.step == plan.step, (
            f"received the output of step {output.step}, expected that of step {plan.step}"
        )
        outputs: OutputsByClient = {}
        sampled = iter(output.sampled_token_ids)
        failed = dict.fromkeys(output.rows_with_nans, NANS_IN_LOGITS) | output.failed
        for row, (request, samples) in enumerate(zip(step.rows, plan.samples, strict=True)):
            extra_steps = plan.extra_steps.get(row, 0) if plan.extra_steps else 0
            if samples > 1 or (samples and plan.extra_steps):
                tokens = list(islice(sampled, 1 + output.accepted[row]))
            else:
                tokens = [next(sampled)] if samples else _NO_TOKENS
            request.pending -= extra_steps + bool(samples)
            if request.status is RequestStatus.FINISHED:
                continue
            extras = output.extras.get(row, _NO_EXTRAS) if output.extras else _NO_EXTRAS
            if row in failed:
                before = tokens if plan.extra_steps else _NO_TOKENS
                kind = FinishReason.INVALID if row in output.invalid else FinishReason.ERROR
                num_nans = output.num_nans_in_logits.get(row, 0)
                answers = self._fail(request, before, extras, failed[row], kind, num_nans)
                outputs.setdefault(request.client, []).extend(answers)
                continue
            if samples:
                answer = request.append(tokens, extras)
                if samples > 1:
                    self._on_drafts(request, len(tokens) - 1)
                elif extra_steps:
                    self._on_passes(request, are_all=len(tokens) == 1 + extra_steps)
            elif request.ends_with_prompt(plan.starts[row] + plan.num_tokens[row]):
                answer = request.finish_prompt(extras)
            elif extras:
                answer = EngineCoreOutput(
                    request.request_id, [], extras=extras, attempt=request.attempt
                )
            else:
                continue
            if answer.finish_reason is not None:
                self._finish(request)
            outputs.setdefault(request.client, []).append(answer)
        if output.proposals:
            self.drafter.on_proposals(step.rows, output.proposals)
        assert next(sampled, None) is None, f"step {output.step} sampled more tokens than planned"
        return outputs

    def _on_drafts(self, request: Request, accepted: int) -> None:
        """Adds accepted drafts, whose KV is valid unless the request has lost its blocks."""
        if request.slot >= 0:
            request.computed += accepted
        self._cache_full_blocks(request)
        self.drafter.on_result(request, accepted)

    def _on_passes(self, request: Request, are_all: bool) -> None:
        """Handles passes that were read. If some were not computed, the request has finished, and
        its last token was not computed."""
        assert are_all or request.status is RequestStatus.FINISHED, (
            "the workers ended the request by themselves"
        )
        if not are_all and request.slot >= 0:
            request.computed = len(request.token_ids) - 1
        self._cache_full_blocks(request)

    def _cache_full_blocks(self, request: Request) -> None:
        """Caches blocks now, as several tokens become known at once and may finish the request."""
        if request.slot >= 0 and request.computed >= request.cacheable_tokens:
            self.kv.cache_full_blocks(request)

    def _fail(
        self,
        request: Request,
        tokens: Sequence[int],
        extras: list[Extra],
        reason: str,
        kind: FinishReason,
        num_nans: int,
    ) -> list[EngineCoreOutput]:
        """Fails a request after these tokens, unless they finish it. Its blocks leave the cache."""
        answers = request.fail_after(tokens, extras, reason, kind)
        if answers[-1].finish_reason is kind:
            self.kv.evict_computed(request)
            self.num_nans_in_logits += reason == NANS_IN_LOGITS
            if num_nans:
                answers[-1] = replace(answers[-1], num_nans_in_logits=num_nans)
        self._finish(request)
        return answers

    def check_idle(self) -> None:
        """Raises AssertionError unless every block and slot is free."""
        assert not self.requests, f"{len(self.requests)} requests are not finished"
        assert not self.running
        assert len(self._free_slots) == self.config.max_rows, "slots leaked"
        self.kv.check_idle()
