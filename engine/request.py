"""A request inside the engine."""

from __future__ import annotations

import enum

from swell.engine.wire import EngineCoreOutput, EngineCoreRequest, FinishReason
from swell.worker.sample.wire import Extra


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
        "block_hashes",
        "block_ids",
        "client",
        "computed",
        "core",
        "num_cached_tokens",
        "num_named_blocks",
        "num_preemptions",
        "order",
        "pending",
        "prompt_tokens",
        "queue_s",
        "queued_at",
        "slot",
        "status",
        "token_ids",
    )

    def __init__(
        self, core: EngineCoreRequest, client: bytes, order: tuple[int, int], queued_at: float
    ) -> None:
        self.core = core
        self.client = client
        """The ingress that asked: outputs go back to it."""
        self.order = order
        """Place under the policy; unique, smaller first, kept over preemption."""
        self.status = RequestStatus.WAITING
        self.prompt_tokens = len(core.prompt_token_ids)
        self.token_ids = core.prompt_token_ids + core.output_token_ids
        self.computed = 0
        self.pending = 0
        self.slot = -1
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []
        self.num_named_blocks = 0
        """Blocks at the start of `block_ids` that can be found by other requests."""
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.queued_at = queued_at
        self.queue_s = -1.0
        """Seconds from arrival to the first schedule; negative until then."""

    @property
    def request_id(self) -> str:
        return self.core.request_id

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    @property
    def total_tokens(self) -> int:
        return len(self.token_ids) + self.pending

    @property
    def tokens_to_schedule(self) -> int:
        """Zero once the last token that it may have is drawn or being drawn."""
        if self.num_outputs + self.pending >= self.core.max_tokens:
            return 0
        return self.total_tokens - self.computed

    def append(self, token_id: int, extras: list[Extra]) -> EngineCoreOutput:
        """Take in a drawn token, decide whether it is the last, and say so."""
        first = self.num_outputs == len(self.core.output_token_ids)
        self.token_ids.append(token_id)
        self.pending -= 1
        reason, stop = self._finish_reason(token_id)
        if reason is not None:
            self.status = RequestStatus.FINISHED
        return EngineCoreOutput(
            request_id=self.core.request_id,
            new_token_ids=[token_id],
            finish_reason=reason,
            stop_reason=stop,
            num_cached_tokens=self.num_cached_tokens if first else 0,
            queue_s=self.queue_s if first else 0.0,
            num_preemptions=self.num_preemptions,
            extras=extras,
        )

    def _finish_reason(self, token_id: int) -> tuple[FinishReason | None, int | None]:
        core = self.core
        if self.num_outputs >= core.min_tokens:
            if token_id in core.eos_token_ids:
                return FinishReason.STOP, None
            if token_id in core.stop_token_ids:
                return FinishReason.STOP, token_id
        if self.num_outputs >= core.max_tokens:
            return FinishReason.LENGTH, None
        return None, None
