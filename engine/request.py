"""A request inside the engine."""

from __future__ import annotations

import enum

from swell.engine.block_hash import pack_tokens
from swell.engine.wire import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    JourneyEvent,
    JourneyEventType,
)
from swell.worker.sample.wire import Extra

MAX_FAILED_ATTEMPTS = 2
"""Engines or workers that may be lost with a request in a step, one after the other and without a
token of it between: it may be the reason, and goes no further. Fewer than the manager replaces."""


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    """Holds no slot and no blocks: new, or preempted."""
    RUNNING = enum.auto()
    """Holds a slot and blocks."""
    FINISHED = enum.auto()


class Request:
    """Tokens known and tokens computed; every step lets the second catch up with the first.

        |<------- prompt_tokens ------->|<------ num_outputs ------>|<- pending ->|
        |<--------------------- token_ids (host) ------------------>|  (device)   |
        |<------------------------- total_tokens -------------------------------->|
        |<-- computed: KV exists or is in flight -->|<- to be scheduled ->|

    `pending` counts tokens that steps in flight draw and that the host has not read.
    """

    __slots__ = (
        "attempt",
        "block_capacity_tokens",
        "block_hashes",
        "block_ids",
        "cacheable_tokens",
        "client",
        "computed",
        "core",
        "failed_attempts",
        "num_cached_blocks",
        "num_cached_tokens",
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
        self, core: EngineCoreRequest, client: bytes, order: tuple[int, int], queued_at: float
    ) -> None:
        self.core = core
        self.request_id = core.request_id
        self.attempt = core.attempt
        self.client = client
        """The ingress of the request: outputs go back to it."""
        self.order = order
        """Place under the policy; unique, smaller first, kept over preemption."""
        self.failed_attempts = core.failed_attempts
        """Above zero it is a suspect, until it has a token: no two of them are computed at the same
        time, so that the next loss finds the one that is to blame."""
        self.status = RequestStatus.WAITING
        self.prompt_tokens = len(core.prompt_token_ids)
        self.token_ids = pack_tokens(core.prompt_token_ids + core.output_token_ids)
        self.computed = 0
        self.pending = 0
        self.tokens_at_start = 0
        """Tokens that it had when it took its slot."""
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
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    @property
    def total_tokens(self) -> int:
        return len(self.token_ids) + self.pending

    @property
    def tokens_to_schedule(self) -> int:
        """Zero once the last token that it may have is sampled or being sampled."""
        known = len(self.token_ids) + self.pending
        if known - self.prompt_tokens >= self.core.max_tokens:
            return 0
        return known - self.computed

    def journey_events(self) -> list[JourneyEvent]:
        """What has happened since it took a slot before, or since it arrived; asked for each time
        that it has taken one."""
        scheduled = JourneyEvent(JourneyEventType.SCHEDULED, self.scheduled_s)
        if self.num_preemptions:
            return [JourneyEvent(JourneyEventType.PREEMPTED, self.preempted_s), scheduled]
        return [JourneyEvent(JourneyEventType.QUEUED, 0.0), scheduled]

    def fail(self, message: str) -> EngineCoreOutput:
        """End with an error that has this reason."""
        self.status = RequestStatus.FINISHED
        return EngineCoreOutput(
            self.request_id, [], FinishReason.ERROR, message, attempt=self.attempt
        )

    def append(self, token_id: int, extras: list[Extra]) -> EngineCoreOutput:
        """Add a sampled token; returns whether it is the last."""
        core = self.core
        self.token_ids.append(token_id)
        self.pending -= 1
        self.failed_attempts = 0
        num_outputs = len(self.token_ids) - self.prompt_tokens
        reason = stop = None
        if num_outputs >= core.max_tokens:
            reason = FinishReason.LENGTH
        if num_outputs >= core.min_tokens:
            if token_id in core.eos_token_ids:
                reason = FinishReason.STOP
            elif token_id in core.stop_token_ids:
                reason, stop = FinishReason.STOP, token_id
        if reason is not None:
            self.status = RequestStatus.FINISHED
        first = num_outputs == len(core.output_token_ids) + 1
        return EngineCoreOutput(
            self.request_id,
            [token_id],
            reason,
            stop,
            self.num_cached_tokens if first else 0,
            self.queue_s if first else 0.0,
            self.num_preemptions,
            extras,
            self.attempt,
        )
