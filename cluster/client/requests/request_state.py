"""One request of a client: where it runs, its output so far, and what another engine needs to
continue it."""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence

from msgspec.structs import replace

from swell.cluster.client.engine_connection import EngineId
from swell.cluster.client.requests.answer_version import AnswerVersion
from swell.cluster.client.requests.handover import Handover
from swell.cluster.client.requests.journey import Journey
from swell.cluster.client.requests.logprobs_processor import LogprobsProcessor
from swell.cluster.client.requests.output_text import OutputText
from swell.cluster.client.requests.outputs import (
    CompletionOutput,
    RequestOutput,
    RequestOutputCollector,
    RequestOutputKind,
)
from swell.cluster.client.requests.routed_experts import RoutedExpertsCollector, RoutedExpertsTable
from swell.cluster.client.requests.stats import RequestTimes
from swell.cluster.client.routing.placement_queue import QueuedRequest
from swell.cluster.client.routing.routed_engine import Route
from swell.coordinator.roster import Member
from swell.engine.request import MAX_FAILED_ATTEMPTS
from swell.engine.wire import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    JourneyEvent,
    JourneyEventType,
)
from swell.worker.sampler_wire import PooledValues

MAX_UNREAD_ATTEMPTS = 5
"""Limit on attempts in a row whose outputs this ingress could not process and which added no
token."""


class EngineGone(RuntimeError):
    """No engine could finish the request."""


class RequestFailed(RuntimeError):
    """The request failed for a reason of its own; its engine still serves all others."""


class RequestInvalid(RuntimeError):
    """The request cannot continue because of its parameters."""


class RequestCancelled(RuntimeError):
    """The request was cancelled by its id."""

    def __init__(self) -> None:
        super().__init__("the request was cancelled before its answer was complete")


class MigrationReason(enum.StrEnum):
    """Why a request continues on another engine."""

    LEFT = "the engine left on request"
    DIED = "the engine was lost"
    REPAIRING = "the engine replaces a worker, or wakes up"
    DROPPED = "the engine dropped it"
    MESSAGES_LOST = "messages to or from the engine were lost"
    UNREACHABLE = "the engine is out of reach, or waits for the coordinator"


class RequestState:
    """One request from its submission to its last output.

    An attempt is one placement of the request on an engine, numbered from 1. It begins with
    `assign` and ends with `unassign`, `end_prefill`, or with the request. `attempt` is the number
    of the running attempt, or of the next one while no engine has the request. Outputs with a lower
    number are late and are dropped.

    `output_token_ids` holds all ids that the client may ever see: ids after a stop string are
    dropped.
    """

    is_moved = False
    """Whether the last attempt was lost and the next one has not begun."""

    def __init__(
        self,
        request: EngineCoreRequest,
        text: OutputText,
        logprobs: LogprobsProcessor,
        *,
        queue: RequestOutputCollector,
        prompt: str | None,
        index: int,
        stream_interval: int,
        arrival_s: float,
        answer_version: AnswerVersion | None = None,
    ) -> None:
        """Requests that together answer one HTTP request share an `answer_version`."""
        self.request = request
        self.answer_version = answer_version or AnswerVersion()
        self.request_id = request.request_id
        self.external_id = request.external_req_id or request.request_id
        """The id of the HTTP request, in an ingress; several requests may share it."""
        self.queue = queue
        """Gets the outputs."""
        self.times = RequestTimes(len(request.prompt_token_ids), arrival_s)
        self.journey = Journey()
        self.attempt = 1
        self.engine: EngineId | None = None
        """The engine that runs it; None while no engine has it."""
        self.ranks: list[int] = []
        """Ranks of the engines of all attempts, in order."""
        self.numerics: str | None = None
        """The numerics class of the engine that began the answer; None if it has not begun."""
        self.started = False
        """Whether the engine has reported that the request is in a step, or is about to be."""
        self.failed_attempts = 0
        """Number of attempts in a row that gave no token and whose engine was lost during a step of
        the request."""
        self.unread = False
        """Whether outputs of this attempt arrived that could not be processed."""
        self.unread_attempts = 0
        """Number of such attempts in a row that ended without a token."""
        self.output_token_ids: list[int] = []
        self.handover = Handover(request)
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._placement: Route | QueuedRequest | None = None
        self._tokens_before_attempt = 0
        self._is_delta = queue.kind == RequestOutputKind.DELTA
        self._prompt = prompt
        self._index = index
        self._stream_interval = stream_interval
        self._text = text
        self._logprobs = logprobs
        self._end_token_ids = {*request.eos_token_ids, *request.stop_token_ids}
        self._pooled = b""
        self._routes = RoutedExpertsCollector() if request.sampler.routed_experts else None
        self._sent_tokens = 0
        self._due_tokens = sys.maxsize if queue.kind == RequestOutputKind.FINAL_ONLY else 1
        """The number of output tokens at which the next output is due: the first token at once,
        then every `stream_interval` tokens."""

    # ---------------------------------------------------------------- attempts

    @property
    def is_queued(self) -> bool:
        return isinstance(self._placement, QueuedRequest)

    @property
    def placement(self) -> tuple[int | None, int | None]:
        """The engine's rank and the number of the attempt; `(None, None)` if no engine has the
        request."""
        return (None, None) if self.engine is None else (self.engine.rank, self.attempt)

    def enqueue(self, queued: QueuedRequest) -> None:
        """Records that the request waits in the queue: no engine can run it now."""
        self._placement = queued

    def assign(self, engine: EngineId, member: Member, route: Route, now_s: float) -> None:
        """Begins an attempt. The engine, which is this member, gets `engine_request()`."""
        self.release()
        self.answer_version.begin(member.version)
        self.handover.assign(member.version)
        if not self.output_token_ids:
            self.numerics = member.numerics
        self._placement = route
        self.engine, self.started, self.unread = engine, False, False
        self.is_moved = False
        self.ranks.append(engine.rank)
        self._tokens_before_attempt = len(self.output_token_ids)
        self.times.record_sent(now_s)

    def on_started(self, events: Sequence[JourneyEvent], now_s: float) -> None:
        """Records that the engine has put the request into a step, or is about to; `events` are
        what it reports. Ignored if no engine has the request any more."""
        if self.engine is not None:
            self.started = True
            self.journey.add_reported(events, self.engine.rank, self.attempt, now_s)

    def on_unread(self) -> None:
        """Records that outputs of this attempt arrived that could not be processed."""
        self.unread = True

    def on_prefilled(self, output: EngineCoreOutput) -> None:
        """Records that the engine has computed the prompt, with which another one continues."""
        self.num_cached_tokens = output.num_cached_tokens

    def unassign(self, reason: MigrationReason) -> None:
        """Ends the attempt so that the request can move.

        Raises EngineGone after too many attempts in a row without a token for which the request
        itself may be the cause: an engine was lost while it computed the request, or the ingress
        could not process its outputs. Lost messages never end a request, however often they
        are lost.
        """
        self._end_attempt()
        self.is_moved = True
        self.handover.fail()
        if len(self.output_token_ids) > self._tokens_before_attempt:
            self.failed_attempts = self.unread_attempts = 0
        elif reason in (MigrationReason.DIED, MigrationReason.REPAIRING):
            self.failed_attempts += self.started
        else:
            self.unread_attempts += self.unread
        if self.failed_attempts >= MAX_FAILED_ATTEMPTS:
            raise EngineGone(
                f"gave up after {self.failed_attempts} engines in a row were lost while they "
                f"computed the request, before its next token (engines {self.ranks}): {reason}"
            )
        if self.unread_attempts > MAX_UNREAD_ATTEMPTS:
            raise EngineGone(
                f"gave up after the outputs of {self.unread_attempts} attempts in a row could not "
                f"be handled (engines {self.ranks}): {reason}"
            )

    def end_prefill(self) -> None:
        """Ends the attempt that computed the prompt; the next attempt continues. The counts of
        failed attempts are not reset: the request may still crash the engines that continue it."""
        self._end_attempt()
        self.handover.end()

    def _end_attempt(self) -> None:
        self.release()
        self.engine = None
        self.attempt += 1

    def release(self) -> None:
        """Removes the request from its engine's load count, or from the queue."""
        if self._placement is not None:
            self._placement.release()
            if isinstance(self._placement, Route):
                self.answer_version.end()
            self._placement = None

    def engine_request(self) -> EngineCoreRequest:
        """Returns what the engine gets. The first attempt gets the request itself. A later attempt,
        on any engine, continues after the outputs that arrived, and does not compute the prompt log
        probabilities again if all are known."""
        request = self.handover.engine_request(self.request)
        if self.attempt == 1:
            return request
        sampler, skip_prefix_cache = request.sampler, request.skip_prefix_cache
        if sampler.prompt_logprobs is not None and self._logprobs.prompt_complete:
            sampler, skip_prefix_cache = replace(sampler, prompt_logprobs=None), False
        return replace(
            request,
            sampler=sampler,
            skip_prefix_cache=skip_prefix_cache,
            output_token_ids=list(self.output_token_ids),
            data_parallel_rank=None,
            attempt=self.attempt,
            failed_attempts=self.failed_attempts,
            waited_s=self.times.waited_s,
        )

    # ---------------------------------------------------------------- outputs

    def update(self, output: EngineCoreOutput) -> None:
        """Applies an output's tokens and finish reason; a stop string may finish the request
        earlier."""
        token_ids, known = output.new_token_ids, self.output_token_ids
        if not token_ids and self.request.sampler.pooling is not None:
            self._take_pooled(output)
            return
        logprobs = self._logprobs.split_extras(output.extras, len(token_ids))
        if self._routes is not None:
            self._routes.add(output.extras)
        if token_ids and len(known) == self._tokens_before_attempt:
            self._on_first_token(output.num_cached_tokens)
        num_visible = len(token_ids)
        if (
            output.finish_reason is FinishReason.STOP
            and not self._text.includes_stop
            and token_ids
            and token_ids[-1] in self._end_token_ids
        ):
            num_visible -= 1
        for position, token_id in enumerate(token_ids):
            known.append(token_id)
            is_text, count = position < num_visible, len(known)
            if logprobs:
                stopped, offset, at_beginning = self._text.push_with_offset(
                    token_id, count, is_text=is_text
                )
                self._logprobs.add(logprobs[position], offset, at_beginning=at_beginning)
            else:
                stopped = is_text and self._text.push(token_id, count)
            if stopped:
                self._end(FinishReason.STOP, self._text.stop_string)
                return
        if output.finish_reason in (FinishReason.ERROR, FinishReason.INVALID):
            # The request failed: text that was held back is not checked for a stop string.
            count = output.num_nans_in_logits
            counted = f" ({count} logits are NaN)" if count else ""
            self._end(output.finish_reason, f"{output.stop_reason}{counted}")
        elif output.finish_reason is not None:
            self.finish(output.finish_reason, output.stop_reason)

    def _take_pooled(self, output: EngineCoreOutput) -> None:
        """Applies the only output of a pooling request: its vector, or an error."""
        for extra in output.extras:
            if isinstance(extra, PooledValues):
                self._on_first_token(output.num_cached_tokens)
                self._pooled = extra.values
        if output.finish_reason is not None:
            self._end(output.finish_reason, output.stop_reason)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Finishes the request. Text that was held back becomes visible, unless it contains a stop
        string, which is then the finish reason."""
        if self._text.finish(len(self.output_token_ids)):
            self._end(FinishReason.STOP, self._text.stop_string)
        else:
            self._end(reason, stop_reason)

    def abandon(self, error: Exception, reason: FinishReason) -> None:
        """Finishes the request without an output."""
        self._end(reason, f"{type(error).__name__}: {error}")

    def fail(self, error: Exception) -> RequestOutput | None:
        """Finishes the request with an error, which its last output names."""
        self._text.clear()
        self._end(FinishReason.ERROR, f"{type(error).__name__}: {error}")
        return self.make_output()

    def make_output(self) -> RequestOutput | None:
        """Returns the output that is due now, if any."""
        finished, count = self.finish_reason is not None, len(self.output_token_ids)
        if not finished and count < self._due_tokens:
            return None
        is_delta = self._is_delta
        token_ids = self.output_token_ids[self._sent_tokens if is_delta else 0 :]
        self._sent_tokens, self._due_tokens = count, count + self._stream_interval
        completion = CompletionOutput(
            index=self._index,
            text=self._text.take(delta_only=is_delta),
            token_ids=token_ids,
            num_output_tokens=count,
            logprobs=self._logprobs.pop_logprobs(delta_only=is_delta),
            cumulative_logprob=self._logprobs.cumulative,
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            stop_reason=self.stop_reason,
            content_limit=self._text.content_limit,
            pooled=self._pooled,
            routed_experts=self._routed_experts() if finished else None,
        )
        return RequestOutput(
            request_id=self.external_id,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[completion],
            finished=finished,
            prompt=self._prompt,
            num_cached_tokens=self.num_cached_tokens,
            version=self.answer_version.version or "",
            prompt_logprobs=self._logprobs.pop_prompt_logprobs(delta_only=is_delta),
        )

    def _routed_experts(self) -> RoutedExpertsTable | None:
        if self._routes is None:
            return None
        return self._routes.table(self.times.num_prompt_tokens + len(self.output_token_ids) - 1)

    def _on_first_token(self, num_cached_tokens: int) -> None:
        """Records the first token (or vector) of an attempt. `num_cached_tokens` is that of the
        first attempt that gave a token."""
        self.answer_version.on_token()
        if not self.output_token_ids and not self.handover.is_ready:
            self.num_cached_tokens = num_cached_tokens
        came_s = self.times.last_token_s
        self.journey.add(JourneyEventType.FIRST_TOKEN, came_s, *self.placement)
        if isinstance(self._placement, Route):
            self._placement.on_first_token()

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
