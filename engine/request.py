"""A request inside the engine."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from swell.engine.block_hash import pack_tokens
from swell.engine.wire import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    JourneyEvent,
    JourneyEventType,
)
from swell.worker.sample.wire import Extra, TokenLogprobs

if TYPE_CHECKING:
    from swell.engine.drafter import RowDrafts

MAX_FAILED_ATTEMPTS = 2
"""Engines or workers that may be lost with a request in a step, one after the other and without a
token of it between: it may be the reason, and goes no further. Fewer than the manager replaces."""


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    """Holds no slot and no blocks: new, or preempted."""
    RUNNING = enum.auto()
    """Holds a slot and blocks."""
    FINISHED = enum.auto()


class HandoverState(enum.Enum):
    """What is known of the KV that another engine has written for a request."""

    EXPECTED = enum.auto()
    """It is looked for when the request begins."""
    READ = enum.auto()
    """It is there, and is read by the next step."""
    NONE = enum.auto()
    """It was read, or there is none."""


class Request:
    """Tokens known and tokens computed; every step lets the second catch up with the first.

        |<------- prompt_tokens ------->|<------ num_outputs ------>|<- pending ->|
        |<--------------------- token_ids (host) ------------------>|  (device)   |
        |<------------------------- total_tokens -------------------------------->|
        |<-- computed: KV exists or is in flight -->|<- to be scheduled ->|

    `pending` counts tokens that steps in flight draw and that the host has not read. Drafts in
    flight are not counted anywhere but in `num_drafts`: `computed` and the tokens grow by those
    that were right when their step is read.
    """

    __slots__ = (
        "arrival_time",
        "attempt",
        "block_capacity_tokens",
        "block_hashes",
        "block_ids",
        "cacheable_tokens",
        "client",
        "computed",
        "core",
        "drafts",
        "failed_attempts",
        "handover",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_drafts",
        "num_preemptions",
        "order",
        "pending",
        "preempted_s",
        "prompt_tokens",
        "queue_s",
        "queued_at",
        "request_id",
        "scheduled_s",
        "slot",
        "status",
        "token_ids",
        "tokens_at_start",
    )

    def __init__(
        self, core: EngineCoreRequest, client: bytes, priority: int, number: int, queued_at: float
    ) -> None:
        """`priority`: under the policy; `number`: unique, larger than those of earlier requests;
        `queued_at`: when it arrived here, in seconds by the clock of the engine."""
        self.core = core
        self.request_id = core.request_id
        self.attempt = core.attempt
        self.client = client
        """The ingress of the request: outputs go back to it."""
        self.arrival_time = queued_at - core.waited_s
        """When it arrived at its ingress, in seconds by the clock of the engine."""
        self.failed_attempts = core.failed_attempts
        """Above zero it is a suspect, until it has a token: no two of them are computed at the same
        time, so that the next loss finds the one that is to blame."""
        since = queued_at if core.failed_attempts else self.arrival_time
        self.order = priority, since, number
        """Place under the policy; unique, smaller first, kept over preemption, and on the way from
        another engine, too. A suspect has lost its place: it may end the next engine."""
        self.status = RequestStatus.WAITING
        self.prompt_tokens = len(core.prompt_token_ids)
        self.token_ids = pack_tokens(core.prompt_token_ids + core.output_token_ids)
        self.computed = 0
        self.pending = 0
        self.num_drafts = 0
        """Drafts of the step in flight that has some: how many tokens it gives is not known."""
        self.drafts: RowDrafts | None = None
        """What is known of its drafts since it has its slot."""
        self.tokens_at_start = 0
        """Tokens that it had when it took its slot."""
        self.handover = HandoverState.EXPECTED if core.handed_over else HandoverState.NONE
        self.slot = -1
        self.block_ids: list[int] = []
        self.block_capacity_tokens = 0
        """How many tokens its blocks can hold."""
        self.block_hashes: list[bytes] = []
        self.num_cached_blocks = 0
        """Blocks at the start of `block_ids` that can be found by other requests."""
        self.cacheable_tokens = 0
        """With so many tokens computed, the next block is full and may be named."""
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.queued_at = queued_at
        self.queue_s = -1.0
        """Seconds from arrival to the first schedule; negative until then."""
        self.scheduled_s = 0.0
        """Seconds from arrival to the last schedule that gave it a slot."""
        self.preempted_s = 0.0
        """Seconds from arrival to its last preemption."""

    @property
    def tokens_to_compute(self) -> int:
        """That are known, and neither computed nor expected from another engine, but for the part
        of a block."""
        if self.handover is HandoverState.EXPECTED:
            return 1
        return self.total_tokens - self.computed

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    @property
    def total_tokens(self) -> int:
        return len(self.token_ids) + self.pending

    @property
    def is_sampling(self) -> bool:
        """Tokens are sampled behind its prompt."""
        return self.core.max_tokens > 0

    @property
    def tokens_to_schedule(self) -> int:
        """Zero once the last token that it may have is sampled or being sampled, and while it has
        drafts in flight."""
        if self.num_drafts:
            return 0
        known = len(self.token_ids) + self.pending
        if known - self.prompt_tokens >= self.core.max_tokens > 0:
            return 0
        return known - self.computed

    def journey_events(self) -> list[JourneyEvent]:
        """What has happened since it took a slot before, or since it arrived; asked for each time
        that it has taken one."""
        scheduled = JourneyEvent(JourneyEventType.SCHEDULED, self.scheduled_s)
        if self.num_preemptions:
            return [JourneyEvent(JourneyEventType.PREEMPTED, self.preempted_s), scheduled]
        return [JourneyEvent(JourneyEventType.QUEUED, 0.0), scheduled]

    def fail(self, message: str, kind: FinishReason = FinishReason.ERROR) -> EngineCoreOutput:
        """End with an error that has this reason."""
        self.status = RequestStatus.FINISHED
        return EngineCoreOutput(self.request_id, [], kind, message, attempt=self.attempt)

    def fail_behind(
        self, sampled: Sequence[int], extras: list[Extra], message: str, kind: FinishReason
    ) -> list[EngineCoreOutput]:
        """Add tokens as `append` does, and fail, unless one of them ends the answer."""
        answers = [self.append(list(sampled), extras)] if sampled else []
        if not answers or answers[0].finish_reason is None:
            answers.append(self.fail(message, kind))
        return answers

    def ends_with_prompt(self, computed: int) -> bool:
        """Whether it ends with the step that computes so many tokens in all: it samples nothing."""
        return not self.core.max_tokens and computed == self.prompt_tokens

    def finish_prompt(self, extras: list[Extra]) -> EngineCoreOutput:
        """The last output of a request that samples nothing."""
        self.status = RequestStatus.FINISHED
        return EngineCoreOutput(
            self.request_id,
            [],
            FinishReason.STOP,
            None,
            self.num_cached_tokens,
            self.queue_s,
            self.num_preemptions,
            extras,
            self.attempt,
        )

    def append(self, sampled: list[int], extras: list[Extra]) -> EngineCoreOutput:
        """Add the tokens that a step sampled, up to one that ends the answer; `extras`: among them
        a `TokenLogprobs` of each token, or none."""
        core, token_ids = self.core, self.token_ids
        before = num_outputs = len(token_ids) - self.prompt_tokens
        self.failed_attempts = 0
        reason = stop = None
        for token_id in sampled:
            token_ids.append(token_id)
            num_outputs += 1
            if num_outputs >= core.max_tokens:
                reason = FinishReason.LENGTH
            if num_outputs >= core.min_tokens:
                if token_id in core.eos_token_ids:
                    reason = FinishReason.STOP
                elif token_id in core.stop_token_ids:
                    reason, stop = FinishReason.STOP, token_id
            if reason is not None:
                self.status = RequestStatus.FINISHED
                taken = num_outputs - before
                if taken < len(sampled):
                    sampled, extras = sampled[:taken], _of_first(extras, taken)
                break
        first = before == len(core.output_token_ids)
        return EngineCoreOutput(
            self.request_id,
            sampled,
            reason,
            stop,
            self.num_cached_tokens if first else 0,
            self.queue_s if first else 0.0,
            self.num_preemptions,
            extras,
            self.attempt,
        )


def _of_first(extras: list[Extra], taken: int) -> list[Extra]:
    """Without those of tokens behind the first ones; others say themselves what they are of."""
    kept, tokens = [], 0
    for extra in extras:
        is_of_token = isinstance(extra, TokenLogprobs)
        tokens += is_of_token
        if not is_of_token or tokens <= taken:
            kept.append(extra)
    return kept
