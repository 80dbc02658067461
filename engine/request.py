"""A request inside the engine."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence

from swell.engine.kv.block_hash import pack_tokens
from swell.engine.row_drafts import RowDrafts
from swell.engine.wire import (
    REPETITION_DETECTED,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    JourneyEvent,
    JourneyEventType,
    RepetitionPattern,
)
from swell.worker.sampler_wire import Extra, TokenLogprobs

MAX_FAILED_ATTEMPTS = 2
"""Maximum number of consecutive losses of engines or workers during steps of a request, without a
token of it in between: the request may be the cause, and fails. Fewer than the manager replaces."""


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    """Holds no slot and no blocks: new, or preempted."""
    RUNNING = enum.auto()
    """Holds a slot and blocks."""
    FINISHED = enum.auto()


class HandoverState(enum.Enum):
    """State of the KV that another engine has written for a request."""

    EXPECTED = enum.auto()
    """To be claimed when the request starts."""
    READ = enum.auto()
    """Claimed; the next step reads it."""
    NONE = enum.auto()
    """Already read, or not available."""


class Request:
    """A request and its progress: every step lets its computed tokens catch up with its known ones.

        |<------- prompt_tokens ------->|<------ num_outputs ------>|<- pending ->|
        |<--------------------- token_ids (host) ------------------>|  (device)   |
        |<------------------------- total_tokens -------------------------------->|
        |<-- computed: KV exists or is in flight -->|<- to be scheduled ->|

    `pending` counts tokens that steps in flight sample and that the host has not read. Drafts in
    flight are counted only in `num_drafts`: accepted drafts are added to `computed` and to the
    tokens when their step is read.
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
        """The ingress of the request: outputs are sent to it."""
        self.arrival_time = queued_at - core.waited_s
        """When it arrived at its ingress, in seconds by the clock of the engine."""
        self.failed_attempts = core.failed_attempts
        """Above zero, the request is a suspect until it has a token. Suspects are never computed at
        the same time, so that the next loss identifies the cause."""
        since = queued_at if core.failed_attempts else self.arrival_time
        self.order = priority, since, number
        """Place in policy order: unique, smaller first; kept during preemption and when it comes
        from another engine. A suspect loses its place, because it may crash the next engine."""
        self.status = RequestStatus.WAITING
        self.prompt_tokens = len(core.prompt_token_ids)
        self.token_ids = pack_tokens(core.prompt_token_ids + core.output_token_ids)
        self.computed = 0
        self.pending = 0
        self.num_drafts = 0
        """Number of its drafts in flight: how many tokens that step yields is not known yet."""
        self.drafts: RowDrafts | None = None
        """State of its drafts since it got its slot."""
        self.tokens_at_start = 0
        """Number of tokens that it had when it got its slot."""
        self.handover = HandoverState.EXPECTED if core.handed_over else HandoverState.NONE
        self.slot = -1
        self.block_ids: list[int] = []
        self.block_capacity_tokens = 0
        """Number of tokens that its blocks can hold."""
        self.block_hashes: list[bytes] = []
        self.num_cached_blocks = 0
        """Number of blocks at the start of `block_ids` that other requests can find."""
        self.cacheable_tokens = 0
        """With this many tokens computed, the next block is full and may be cached."""
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.queued_at = queued_at
        self.queue_s = -1.0
        """Seconds from arrival to the first schedule; negative until then."""
        self.scheduled_s = 0.0
        """Seconds from arrival to the last schedule that assigned a slot."""
        self.preempted_s = 0.0
        """Seconds from arrival to its last preemption."""

    @property
    def tokens_to_compute(self) -> int:
        """Number of known tokens that are not computed yet. If another engine is expected to have
        computed the prompt, 1 stands for the rest of a block."""
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
        """Whether tokens are sampled after its prompt."""
        return self.core.max_tokens > 0

    @property
    def tokens_to_schedule(self) -> int:
        """Number of tokens to schedule. Zero once the last allowed token is sampled or pending, and
        while it has drafts in flight."""
        if self.num_drafts:
            return 0
        known = len(self.token_ids) + self.pending
        if known - self.prompt_tokens >= self.core.max_tokens > 0:
            return 0
        return known - self.computed

    def journey_events(self) -> list[JourneyEvent]:
        """Returns the events since it last got a slot, or since it arrived. Called each time it
        gets a slot."""
        scheduled = JourneyEvent(JourneyEventType.SCHEDULED, self.scheduled_s)
        if self.num_preemptions:
            return [JourneyEvent(JourneyEventType.PREEMPTED, self.preempted_s), scheduled]
        return [JourneyEvent(JourneyEventType.QUEUED, 0.0), scheduled]

    def fail(self, message: str, kind: FinishReason = FinishReason.ERROR) -> EngineCoreOutput:
        """Finishes the request with this error message."""
        self.status = RequestStatus.FINISHED
        return EngineCoreOutput(self.request_id, [], kind, message, attempt=self.attempt)

    def fail_after(
        self, sampled: Sequence[int], extras: list[Extra], message: str, kind: FinishReason
    ) -> list[EngineCoreOutput]:
        """Adds tokens like `append`, and then fails, unless one of them finishes the answer."""
        answers = [self.append(list(sampled), extras)] if sampled else []
        if not answers or answers[0].finish_reason is None:
            answers.append(self.fail(message, kind))
        return answers

    def ends_with_prompt(self, computed: int) -> bool:
        """Whether the request samples nothing and finishes with the step that completes `computed`
        tokens."""
        return not self.core.max_tokens and computed == self.prompt_tokens

    def finish_prompt(self, extras: list[Extra]) -> EngineCoreOutput:
        """Returns the last output of a request that samples nothing."""
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

    def _is_repetition(self, num_outputs: int) -> bool:
        pattern = self.core.repetition
        return pattern is not None and _ends_with_copies(self.token_ids, num_outputs, pattern)

    def append(self, sampled: list[int], extras: list[Extra]) -> EngineCoreOutput:
        """Adds the tokens that a step sampled, up to one that finishes the answer. `extras`
        contains a `TokenLogprobs` for each token, or none."""
        core, token_ids = self.core, self.token_ids
        before = num_outputs = len(token_ids) - self.prompt_tokens
        self.failed_attempts = 0
        reason: FinishReason | None = None
        stop: int | str | None = None
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
                elif reason is None and self._is_repetition(num_outputs):
                    reason, stop = FinishReason.REPETITION, REPETITION_DETECTED
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


def _ends_with_copies(token_ids: array[int], num_outputs: int, pattern: RepetitionPattern) -> bool:
    """Returns whether the last `num_outputs` tokens end with enough copies of a pattern. Only sizes
    at whose distance the last token occurs are compared."""
    largest = min(pattern.max_size, num_outputs // pattern.min_count)
    newest_first = token_ids[: -largest - 2 : -1]
    size = pattern.min_size - 1
    while size < largest:
        try:
            size = newest_first.index(token_ids[-1], size + 1)
        except ValueError:
            return False
        copies = size * pattern.min_count
        # The shorter comparison comes first, because most sizes fail there.
        if (
            token_ids[-size:] == token_ids[-2 * size : -size]
            and token_ids[-copies:-size] == token_ids[size - copies :]
        ):
            return True
    return False


def _of_first(extras: list[Extra], taken: int) -> list[Extra]:
    """Removes the extras of tokens after the first `taken` ones; extras that do not belong to a
    token are kept."""
    kept, tokens = [], 0
    for extra in extras:
        is_of_token = isinstance(extra, TokenLogprobs)
        tokens += is_of_token
        if not is_of_token or tokens <= taken:
            kept.append(extra)
    return kept
