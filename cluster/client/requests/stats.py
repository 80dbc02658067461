"""Times and counts of requests, gathered in the loop over outputs and passed to a sink.

    arrival -- queue -- scheduled -- prefill -- first token -- decode -- last token
    |<------------- time to first token ------------->|<- inter-token ->|
    |<------------------------------- end to end -------------------------------->|

`queue` ends when the engine that produced the first token first schedules the request. The ingress
measures the time until that engine got the request (no engine was available, or another one was
lost). The engine measures the rest of the queue time on its own clock. The ingress measures
everything else. A request that ended before its first token has neither a prefill nor a decode
time, and its queue time is known only if no engine ever had it. A pooling request has a vector
instead of a first token, and no time to first token.
"""

from __future__ import annotations

import msgspec

from swell.engine.wire import EngineCoreOutput, FinishReason


class FinishedRequestStats(msgspec.Struct, frozen=True, kw_only=True):
    finish_reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    e2e_s: float
    queue_s: float | None
    """From arrival to first schedule. None, here and below, means unknown or not applicable."""
    prefill_s: float | None
    """From first schedule to first token."""
    decode_s: float | None
    """From first to last token."""


class IterationStats(msgspec.Struct, kw_only=True):
    """The statistics of one iteration of the loop over outputs."""

    num_prompt_tokens: int = 0
    """Prompt tokens of requests whose first token, or vector, arrived."""
    num_output_tokens: int = 0
    time_to_first_token_s: list[float] = []
    inter_token_latency_s: list[float] = []
    """One entry per token; tokens that arrive together share their gap evenly."""
    finished: list[FinishedRequestStats] = []


class StatsSink:
    """Receives the statistics of each iteration. This base class drops them."""

    def record(self, stats: IterationStats) -> None:
        """Receives the statistics of one iteration."""


class RequestTimes:
    """The timestamps of one request."""

    def __init__(self, num_prompt_tokens: int, arrival_s: float) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.arrival_s = arrival_s
        self.first_token_s: float | None = None
        self.last_token_s = arrival_s
        self.waited_s = 0.0
        """Time from the arrival of the request until it was last sent to an engine."""
        self._sent_s: float | None = None
        """When the request was sent to the engine that gave the first token, or else to the last
        one."""
        self._engine_queue_s = 0.0

    def record_sent(self, now_s: float) -> None:
        """Records that the request is sent to an engine, for the first time or again."""
        self.waited_s = max(now_s - self.arrival_s, 0.0)
        if self.first_token_s is None:
            self._sent_s = now_s

    def record_tokens(self, output: EngineCoreOutput, now_s: float, stats: IterationStats) -> None:
        """Accounts for the tokens of one output."""
        count = len(output.new_token_ids)
        if not count:
            if output.finish_reason is FinishReason.STOP:
                self._record_pooled(output, now_s, stats)
            return
        stats.num_output_tokens += count
        if self.first_token_s is None:
            self.first_token_s = self.last_token_s = now_s
            self._engine_queue_s = output.queue_s
            stats.num_prompt_tokens += self.num_prompt_tokens
            stats.time_to_first_token_s.append(now_s - self.arrival_s)
            count -= 1
        if count:
            gap_s = (now_s - self.last_token_s) / count
            stats.inter_token_latency_s.extend([gap_s] * count)
        self.last_token_s = now_s

    def _record_pooled(self, output: EngineCoreOutput, now_s: float, stats: IterationStats) -> None:
        """Accounts for the vector of a pooling request, which never gets a first token."""
        self.first_token_s = self.last_token_s = now_s
        self._engine_queue_s = output.queue_s
        stats.num_prompt_tokens += self.num_prompt_tokens

    def finish(self, reason: str, num_output_tokens: int, now_s: float) -> FinishedRequestStats:
        queue_s = prefill_s = decode_s = None
        if self.first_token_s is not None:
            sent_s = self.arrival_s if self._sent_s is None else self._sent_s
            queue_s = sent_s - self.arrival_s + self._engine_queue_s
            prefill_s = max(self.first_token_s - self.arrival_s - queue_s, 0.0)
            decode_s = max(self.last_token_s - self.first_token_s, 0.0)
        elif self._sent_s is None:
            queue_s = now_s - self.arrival_s
        return FinishedRequestStats(
            finish_reason=reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            e2e_s=now_s - self.arrival_s,
            queue_s=queue_s,
            prefill_s=prefill_s,
            decode_s=decode_s,
        )
