"""Times and counts of requests, gathered in the loop over outputs and handed to a sink.

    arrival -- queue -- scheduled -- prefill -- first token -- decode -- last token
    |<------------- time to first token ------------->|<- inter-token ->|
    |<------------------------------- end to end -------------------------------->|

`queue` ends with the first schedule on the engine that gave the first token. The time before that
engine got the request (no engine was there, or another one was lost) is measured by the ingress,
the rest of the queue by the engine on its own clock; everything else by the ingress. A request that
ended before its first token has no prefill and no decode, and its queue is known only if it never
was on an engine. A request that pools has a vector in place of a first token, and no time to it.
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
    """From arrival to first schedule. None, here and below: not known, or there was none."""
    prefill_s: float | None
    """From first schedule to first token."""
    decode_s: float | None
    """From first to last token."""


class IterationStats(msgspec.Struct, kw_only=True):
    """The statistics of one call of the loop."""

    num_prompt_tokens: int = 0
    """Prompts whose first token, or vector, came."""
    num_output_tokens: int = 0
    time_to_first_token_s: list[float] = []
    inter_token_latency_s: list[float] = []
    """One entry per token; tokens that came together share their gap evenly."""
    finished: list[FinishedRequestStats] = []


class StatsSink:
    """Takes the statistics of each iteration. This one drops them: statistics are off."""

    def record(self, stats: IterationStats) -> None:
        """Take the statistics of one iteration."""


class RequestTimes:
    """The clock readings of one request."""

    def __init__(self, num_prompt_tokens: int, arrival_s: float) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.arrival_s = arrival_s
        self.first_token_s: float | None = None
        self.last_token_s = arrival_s
        self.waited_s = 0.0
        """From its arrival until an engine got it, the last time."""
        self._sent_s: float | None = None
        """When the engine got it that gave its first token, or else the last one."""
        self._engine_queue_s = 0.0

    def record_sent(self, now_s: float) -> None:
        """An engine gets the request, for the first time or again."""
        self.waited_s = max(now_s - self.arrival_s, 0.0)
        if self.first_token_s is None:
            self._sent_s = now_s

    def record_tokens(self, output: EngineCoreOutput, now_s: float, stats: IterationStats) -> None:
        """Account for the tokens of one output."""
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
        """Account for a vector, which is all that its request gives: it has no first token."""
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
