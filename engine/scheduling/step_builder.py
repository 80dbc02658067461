"""Builds a step while the scheduler decides, and turns it into a plan."""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

import msgspec

from swell.engine.kv.kv_cache_manager import KVCacheManager
from swell.engine.request import Request
from swell.engine.wire import JourneyEvent
from swell.worker.wire import NewBlocks, NewRequest, SchedulerOutput

_count = itemgetter(1)
"""Number of tokens of a row of a `StepBuilder`."""


class StartedRequest(NamedTuple):
    """A request for which a worker is about to do something that may crash it: a step, or the load
    of an adapter."""

    client: bytes
    request_id: str
    attempt: int
    failed_attempts: int
    events: list[JourneyEvent]


class ScheduledStep(msgspec.Struct):
    """A plan and the requests of its rows."""

    plan: SchedulerOutput
    rows: list[Request] = []

    def started(self) -> list[StartedRequest]:
        """Returns the requests that get their slots in this step."""
        slots = {row.slot for row in self.plan.new_requests}
        return [
            StartedRequest(r.client, r.request_id, r.attempt, r.failed_attempts, r.journey_events())
            for r in self.rows
            if r.slot in slots
        ]


class StepBuilder(msgspec.Struct):
    """Collects the rows of a step: (request, number of tokens to compute), without drafts."""

    budget_tokens: int
    rows: list[tuple[Request, int]] = []
    new_requests: list[NewRequest] = []
    new_blocks: list[NewBlocks] = []
    preempted: bool = False
    drafts: dict[int, list[int]] = {}
    """Slot -> the drafts of its request."""
    proposals: dict[int, int] = {}
    """Slot -> how many tokens the draft model must propose after its new ones."""
    extra_steps: dict[int, int] = {}
    """Slot -> how many tokens are computed and sampled after its first one (`multi_step.py`)."""

    def add_new(self, request: Request, vocab_size: int, finds_ends: bool) -> None:
        """Adds a request that has got a slot. `finds_ends`: workers also detect where it
        finishes."""
        core = request.core
        ends = core.eos_token_ids + core.stop_token_ids if core.min_tokens or finds_ends else []
        self.new_requests.append(
            NewRequest(
                slot=request.slot,
                token_ids=request.token_ids.tolist(),
                prompt_tokens=request.prompt_tokens,
                block_ids=request.block_ids.copy(),
                sampler=core.sampler,
                min_tokens=core.min_tokens,
                end_token_ids=[token for token in ends if 0 <= token < vocab_size],
                prompt_embeds=core.prompt_embeds and core.prompt_embeds.after(request.computed),
                adapter=core.adapter.digest if core.adapter else "",
            )
        )

    def add_row(self, request: Request, count: int) -> None:
        self.rows.append((request, count))
        self.budget_tokens -= count

    def room_for(self, request: Request, count: int, running: int, kv: KVCacheManager) -> int:
        """Returns how many of `count` tokens after the request's own have room in blocks. Allocates
        blocks only if enough remain for all running requests. `running`: number of requests with a
        slot."""
        end, spare = request.total_tokens + count, kv.pool.num_free - running
        if count and end > request.block_capacity_tokens and spare > 0:
            end = min(end, request.block_capacity_tokens + spare * kv.block_tokens)
            blocks = kv.grow(request, end)
            if blocks:
                self.new_blocks.append(NewBlocks(request.slot, blocks))
        return min(count, request.block_capacity_tokens - request.total_tokens)

    def plan(self, step: int, kv: KVCacheManager) -> ScheduledStep:
        """Creates the plan, decode rows first, and updates the requests as if the step were
        computed and no draft accepted: accepted drafts are added when the result is read."""
        self.rows.sort(key=_count)
        copies = kv.offload.take_copies()
        plan = SchedulerOutput(
            step, 0, self.new_requests, self.new_blocks, copies=copies, imports=kv.take_imports()
        )
        scheduled = ScheduledStep(plan)
        rows, slots, starts = scheduled.rows, plan.slots, plan.starts
        num_tokens, samples = plan.num_tokens, plan.samples
        for request, count in self.rows:
            rows.append(request)
            slots.append(request.slot)
            starts.append(request.computed)
            num_tokens.append(count)
            computed = request.computed = request.computed + count
            is_sampled = computed == request.total_tokens and request.is_sampling
            samples.append(1 if is_sampled else 0)
            request.pending += is_sampled
            if computed >= request.cacheable_tokens:
                kv.cache_full_blocks(request)
            if request.core.hand_over and computed == request.prompt_tokens:
                plan.exports.append(kv.exported(request))
        if self.drafts:
            self._add_drafts(plan)
        if self.proposals:
            for row, slot in enumerate(slots):
                if slot in self.proposals:
                    plan.proposals[row] = self.proposals[slot]
        if self.extra_steps:
            self._add_passes(scheduled)
        return scheduled

    def _add_passes(self, scheduled: ScheduledStep) -> None:
        """Updates the requests as if the further passes were computed, too: their sampled tokens
        are pending like the first token."""
        for row, request in enumerate(scheduled.rows):
            extra_steps = self.extra_steps.get(request.slot, 0)
            if extra_steps:
                scheduled.plan.extra_steps[row] = extra_steps
                request.computed += extra_steps
                request.pending += extra_steps

    def _add_drafts(self, plan: SchedulerOutput) -> None:
        for row, slot in enumerate(plan.slots):
            tokens = self.drafts.get(slot)
            if tokens is not None:
                plan.drafts[row] = tokens
                plan.num_tokens[row] += len(tokens)
                plan.samples[row] += len(tokens)
