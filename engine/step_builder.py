"""A step while it is being decided, and the plan that it becomes."""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

import msgspec

from swell.engine.kv_cache_manager import KVCacheManager
from swell.engine.request import Request
from swell.engine.wire import JourneyEvent
from swell.worker.wire import BlockGrowth, NewRow, SchedulerOutput

_count = itemgetter(1)
"""Tokens of a row of a `StepBuilder`."""


class StartedRequest(NamedTuple):
    """A request for which a worker does something that may end it: a step, or the load of an
    adapter."""

    client: bytes
    request_id: str
    attempt: int
    failed_attempts: int
    events: list[JourneyEvent]


class ScheduledStep(msgspec.Struct):
    """A plan and the requests that its rows belong to."""

    plan: SchedulerOutput
    rows: list[Request] = []

    def started(self) -> list[StartedRequest]:
        """Requests that take their slots with this step."""
        slots = {row.slot for row in self.plan.new_rows}
        return [
            StartedRequest(r.client, r.request_id, r.attempt, r.failed_attempts, r.journey_events())
            for r in self.rows
            if r.slot in slots
        ]


class StepBuilder(msgspec.Struct):
    """Rows are (request, tokens to compute), drafts not counted."""

    budget_tokens: int
    rows: list[tuple[Request, int]] = []
    new_rows: list[NewRow] = []
    growths: list[BlockGrowth] = []
    preempted: bool = False
    drafts: dict[int, list[int]] = {}
    """Slot -> the drafts of its request."""
    proposals: dict[int, int] = {}
    """Slot -> how many tokens are to be guessed behind its new ones."""
    further: dict[int, int] = {}
    """Slot -> how many tokens are computed and sampled behind its first one (`multi_step.py`)."""

    def add_new(self, request: Request, vocab_size: int, finds_ends: bool) -> None:
        """A request has taken a slot. `finds_ends`: the workers find where it ends, too."""
        core = request.core
        ends = core.eos_token_ids + core.stop_token_ids if core.min_tokens or finds_ends else []
        self.new_rows.append(
            NewRow(
                slot=request.slot,
                token_ids=request.token_ids.tolist(),
                prompt_tokens=request.prompt_tokens,
                block_ids=request.block_ids.copy(),
                sampler=core.sampler,
                min_tokens=core.min_tokens,
                end_token_ids=[token for token in ends if 0 <= token < vocab_size],
                prompt_embeds=core.prompt_embeds and core.prompt_embeds.behind(request.computed),
                adapter=core.adapter.digest if core.adapter else "",
            )
        )

    def add_row(self, request: Request, count: int) -> None:
        self.rows.append((request, count))
        self.budget_tokens -= count

    def room_for(self, request: Request, count: int, running: int, kv: KVCacheManager) -> int:
        """How many of `count` tokens behind the request's own have a place in blocks; takes free
        blocks if there are enough for everybody. `running`: requests that have a slot."""
        end, spare = request.total_tokens + count, kv.pool.num_free - running
        if count and end > request.block_capacity_tokens and spare > 0:
            end = min(end, request.block_capacity_tokens + spare * kv.block_tokens)
            blocks = kv.grow(request, end)
            if blocks:
                self.growths.append(BlockGrowth(request.slot, blocks))
        return min(count, request.block_capacity_tokens - request.total_tokens)

    def plan(self, step: int, kv: KVCacheManager) -> ScheduledStep:
        """Write the step down, decode rows first, and advance as if it were done, and no draft
        right: what the drafts give is added when the result is read."""
        self.rows.sort(key=_count)
        copies = kv.offload.take_copies()
        plan = SchedulerOutput(
            step, 0, self.new_rows, self.growths, copies=copies, imports=kv.take_imports()
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
        if self.further:
            self._add_passes(scheduled)
        return scheduled

    def _add_passes(self, scheduled: ScheduledStep) -> None:
        """As if they were computed, too: what they sample is pending like the first token."""
        for row, request in enumerate(scheduled.rows):
            further = self.further.get(request.slot, 0)
            if further:
                scheduled.plan.further[row] = further
                request.computed += further
                request.pending += further

    def _add_drafts(self, plan: SchedulerOutput) -> None:
        for row, slot in enumerate(plan.slots):
            tokens = self.drafts.get(slot)
            if tokens is not None:
                plan.drafts[row] = tokens
                plan.num_tokens[row] += len(tokens)
                plan.samples[row] += len(tokens)
