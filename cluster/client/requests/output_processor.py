"""Turns engine outputs into request outputs, in the one loop over all that engines send.

Each output updates the statistics, the text and the stop strings, and produces an output of the
requested kind, which goes to the request's queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

import msgspec

from swell.cluster.client.requests.answer_version import AnswerVersion
from swell.cluster.client.requests.logprobs_processor import LogprobsProcessor
from swell.cluster.client.requests.output_text import OutputText
from swell.cluster.client.requests.outputs import (
    RequestOutput,
    RequestOutputCollector,
    RequestOutputKind,
)
from swell.cluster.client.requests.request_state import RequestState
from swell.cluster.client.requests.stats import IterationStats, StatsSink
from swell.cluster.text.params.sampling_params import SamplingParams
from swell.cluster.text.parsers.base import Parser
from swell.cluster.text.tokens.detokenizer import Detokenizer, TextStart
from swell.cluster.text.tokens.token_texts import TokenTexts
from swell.configs.runtime.log import StructuredLogger
from swell.coordinator.transport.runtime import THREADS
from swell.engine.wire import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from swell.worker.sampler_wire import TokenLogprobs


class OutputProcessorOutput(msgspec.Struct):
    finished: list[RequestState] = []
    """Requests that have finished."""
    reqs_to_abort: list[RequestState] = []
    """Requests that a stop string finished: their engines do not know it yet."""
    dropped: list[RequestState] = []
    """Requests that their engine dropped although this client did not abort them."""
    prefilled: list[RequestState] = []
    """Requests whose prompt was computed for another engine."""


class OutputProcessor:
    """All requests of one client (an ingress, or the in-process `LLM`): the table of their states
    and the handling of their outputs."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stream_interval: int = 1,
        stats: StatsSink | None = None,
        clock: Callable[[], float] = THREADS.now,
        log: StructuredLogger | None = None,
    ) -> None:
        """`stream_interval` is the minimum number of tokens between two outputs of a request; a
        request's parameters may set a larger one. `log` gets each request that finishes with an
        error."""
        self.request_states: dict[str, RequestState] = {}
        """All unfinished requests, by id."""
        self._detokenizer = detokenizer
        self._texts = TokenTexts(detokenizer)
        self._stream_interval = stream_interval
        self._stats = stats or StatsSink()
        self._clock = clock
        self._log = log

    def add_request(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
        *,
        kind: RequestOutputKind = RequestOutputKind.DELTA,
        queue: RequestOutputCollector | None = None,
        prompt: str | None = None,
        index: int = 0,
        text_start: TextStart = TextStart.NEW_TEXT,
        answer_version: AnswerVersion | None = None,
        make_content_parser: Callable[[], Parser] | None = None,
    ) -> RequestState:
        """Registers `request` and returns its state. `prompt` is the text that was sent, if it was
        text. `queue`, a collector of this `kind`, gets its outputs; None: a new one.
        `make_content_parser` is as in `OutputText`."""
        assert request.request_id not in self.request_states, request.request_id
        assert not request.output_token_ids, "a later attempt keeps its first state"
        texts, prompt_token_ids = self._texts, request.prompt_token_ids
        skip = params.skip_special_tokens
        state = RequestState(
            request,
            OutputText(
                params,
                self._detokenizer,
                texts,
                text_start,
                prompt_token_ids,
                make_content_parser,
            ),
            LogprobsProcessor(request, texts, skip_special_tokens=skip, prompt=prompt),
            queue=RequestOutputCollector(kind) if queue is None else queue,
            prompt=prompt,
            index=index,
            stream_interval=max(self._stream_interval, params.stream_interval or 1),
            arrival_s=self._clock(),
            answer_version=answer_version,
        )
        self.request_states[request.request_id] = state
        return state

    def find(self, request_id: str, attempt: int) -> RequestState | None:
        """Returns the request if this attempt is the running one. Returns None if the request or
        the attempt has ended: messages about it are late."""
        state = self.request_states.get(request_id)
        return state if state is not None and state.attempt == attempt else None

    def process_started(self, message: EngineCoreOutputs) -> None:
        """Marks requests that enter a step of their engine as started."""
        started, now_s = zip(message.started, message.started_attempts, strict=True), self._clock()
        for (request_id, attempt), events in zip_longest(started, message.journey_events):
            state = self.find(request_id, attempt)
            if state is not None:
                state.on_started(events or (), now_s)

    def process_outputs(self, outputs: Iterable[EngineCoreOutput]) -> OutputProcessorOutput:
        """Processes outputs; ignores those of requests and attempts that have ended."""
        result = OutputProcessorOutput()
        stats, now_s = IterationStats(), self._clock()
        for output in outputs:
            state = self.find(output.request_id, output.attempt)
            if state is None:
                continue
            if output.finish_reason is FinishReason.ABORT:
                result.dropped.append(state)
                continue
            if state.handover.is_prefilling and output.finish_reason is FinishReason.LENGTH:
                state.on_prefilled(output)
                result.prefilled.append(state)
                continue
            # 1) statistics, 2) text and stop strings, 3) the client's output, 4) the finish.
            state.times.record_tokens(output, now_s, stats)
            pieces: Sequence[EngineCoreOutput] = (output,)
            if state.queue.takes_each_token:
                pieces = one_by_one(output)
            for piece in pieces:
                try:
                    state.update(piece)
                    request_output = state.make_output()
                except Exception as error:  # a decoder may raise: its request fails
                    request_output = state.fail(error)
                if request_output is not None:
                    state.queue.put(request_output)
                if state.finish_reason is not None:
                    break
            if state.finish_reason is not None:
                self._remove(state, now_s, stats)
                result.finished.append(state)
                if not output.finished:
                    result.reqs_to_abort.append(state)
        self._stats.record(stats)
        return result

    def abort_requests(self, request_ids: Iterable[str]) -> list[RequestState]:
        """Finishes requests with finish reason `abort`; their clients get the output so far.
        Returns the requests that finished, which the caller aborts in their engines. Ignores
        unknown ids."""

        def abort(state: RequestState) -> RequestOutput | None:
            try:
                state.finish(FinishReason.ABORT)
                return state.make_output()
            except Exception as error:  # a decoder may raise: only its request fails
                return state.fail(error)

        return self._end(request_ids, abort)

    def propagate_error(
        self,
        error: Exception,
        request_ids: Iterable[str] | None = None,
        reason: FinishReason = FinishReason.ERROR,
    ) -> list[RequestState]:
        """Finishes the given requests (None: all) with an exception, so that their clients do not
        wait forever. Returns those that finished; `reason` is for the statistics."""

        def fail(state: RequestState) -> Exception:
            state.abandon(error, reason)
            return error

        return self._end(list(self.request_states) if request_ids is None else request_ids, fail)

    def _end(
        self,
        request_ids: Iterable[str],
        end: Callable[[RequestState], RequestOutput | Exception | None],
    ) -> list[RequestState]:
        """Finishes requests; `end` returns what the client gets."""
        stats, now_s, ended = IterationStats(), self._clock(), []
        for request_id in request_ids:
            state = self.request_states.get(request_id)
            if state is None:
                continue
            output = end(state)
            if output is not None:
                state.queue.put(output)
            self._remove(state, now_s, stats)
            ended.append(state)
        self._stats.record(stats)
        return ended

    def _remove(self, state: RequestState, now_s: float, stats: IterationStats) -> None:
        del self.request_states[state.request_id]
        state.release()
        reason, num_tokens = str(state.finish_reason), len(state.output_token_ids)
        finished = state.times.finish(reason, num_tokens, now_s)
        state.journey.finish(now_s, *state.placement, finished)
        stats.finished.append(finished)
        if state.finish_reason is FinishReason.ERROR and self._log is not None:
            # `/admin/requests/ID` finds the external id while the ingress remembers the request.
            id, reason = state.external_id, " ".join(str(state.stop_reason).split())
            self._log.warning("request failed", id=id, reason=reason, ranks=state.ranks)


def one_by_one(output: EngineCoreOutput) -> Sequence[EngineCoreOutput]:
    """Returns outputs of one token each. The first one has the extras that belong to no token, the
    last one has the finish reason."""
    *before, last = output.new_token_ids or [0]
    if not before:
        return (output,)
    others = [extra for extra in output.extras if not isinstance(extra, TokenLogprobs)]
    rows = [extra for extra in output.extras if isinstance(extra, TokenLogprobs)]
    pieces = [
        msgspec.structs.replace(
            output,
            new_token_ids=[token_id],
            extras=(others if place == 0 else []) + rows[place : place + 1],
            finish_reason=None,
            stop_reason=None,
        )
        for place, token_id in enumerate(before)
    ]
    return [
        *pieces,
        msgspec.structs.replace(output, new_token_ids=[last], extras=rows[len(before) :]),
    ]
