"""Engine outputs to request outputs: the one loop over everything that engines answer.

For each output: statistics, text and stop strings, an output of the kind that was asked for, and
on to its collector (or, without one, into the returned list, as a synchronous caller wants it).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from swell.cluster.client.logprobs_processor import LogprobsProcessor
from swell.cluster.client.outputs import (
    CompletionOutput,
    RequestOutput,
    RequestOutputCollector,
    RequestOutputKind,
)
from swell.cluster.client.stats import IterationStats, NoStats, RequestTimes, StatsSink
from swell.cluster.text.detokenizer import Detokenizer, TextStart
from swell.cluster.text.sampling_params import SamplingParams
from swell.cluster.text.stop_strings import stop_checker
from swell.cluster.text.token_texts import TokenTexts
from swell.engine.wire import EngineCoreOutput, EngineCoreRequest, FinishReason
from swell.worker.sample.wire import TokenLogprobs

__all__ = [
    "CompletionOutput",
    "OutputProcessor",
    "OutputProcessorOutput",
    "RequestOutput",
    "RequestOutputCollector",
    "RequestOutputKind",
    "RequestState",
]


class OutputProcessorOutput(msgspec.Struct):
    request_outputs: list[RequestOutput]
    """For requests without a collector."""
    reqs_to_abort: list[str]
    """Internal ids that ended by a stop string: their engines do not know it yet."""


class RequestState:
    """One request on its way: what it has said, and what a resubmission needs.

    `output_token_ids` are all that the asker may ever see: ids behind a stop string are gone.
    """

    def __init__(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
        detokenizer: Detokenizer,
        texts: TokenTexts,
        *,
        kind: RequestOutputKind,
        queue: RequestOutputCollector | None,
        prompt: str | None,
        index: int,
        stream_interval: int,
        arrival_s: float,
        text_start: TextStart,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id or request.request_id
        self.queue = queue
        self.output_token_ids: list[int] = []
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.times = RequestTimes(arrival_s)
        self._kind = kind
        self._prompt = prompt
        self._index = index
        self._stream_interval = stream_interval
        skip = params.skip_special_tokens
        self._machine = detokenizer.start(skip, text_start, request.prompt_token_ids)
        self._writer = texts.text_writer(self._machine, skip)
        """Of the machine's text, where places are asked for too."""
        self._include_stop = params.include_stop_str_in_output
        self._stops = stop_checker(
            params.stop_strings,
            include_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )
        self._end_token_ids = {*request.eos_token_ids, *request.stop_token_ids}
        self._text: list[str] = []
        """Pieces; of a stream of deltas only those that have not been sent."""
        self._num_chars = 0
        """Of all text so far, also of what is held back or behind a stop string."""
        self._logprobs = LogprobsProcessor(request, texts, skip_special_tokens=skip, prompt=prompt)
        self._sent_tokens = 0
        self._answered = False
        """An engine has answered: later runs do not change `num_cached_tokens`."""

    def resubmission(self, **changes: Any) -> EngineCoreRequest:
        """The request as another engine must get it to continue where this one stands. What is
        known of every prompt token is not asked for again."""
        request = self.request
        if request.sampler.prompt_logprobs is not None and self._logprobs.prompt_complete:
            sampler = msgspec.structs.replace(request.sampler, prompt_logprobs=None)
            changes = {"sampler": sampler, "skip_prefix_cache": False, **changes}
        return msgspec.structs.replace(
            request, output_token_ids=list(self.output_token_ids), **changes
        )

    def update(self, output: EngineCoreOutput) -> None:
        """Take tokens and the end; a stop string may bring the end earlier."""
        token_ids = output.new_token_ids
        told = self._logprobs.sort(output.extras, len(token_ids))
        if token_ids and not self._answered:
            self._answered = True
            self.num_cached_tokens = output.num_cached_tokens
        visible = len(token_ids)
        if (
            output.finish_reason == FinishReason.STOP
            and not self._include_stop
            and token_ids
            and token_ids[-1] in self._end_token_ids
        ):
            visible -= 1
        for position, token_id in enumerate(token_ids):
            self.output_token_ids.append(token_id)
            if told:
                text = self._add_logprobs(token_id, told[position], is_text=position < visible)
            else:
                text = self._machine.push(token_id) if position < visible else ""
            if self._append_text(text):
                return
        if output.finish_reason is FinishReason.ERROR:
            # What was held back is no end of the answer, even where it holds a stop string.
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        elif output.finish_reason is not None:
            self.finish(output.finish_reason, output.stop_reason)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """The engine has ended it: what was held back is text after all, or its last stop."""
        if self._append_text(self._machine.flush()):
            return
        self._text.append(self._stops.flush())
        self.finish_reason, self.stop_reason = reason, stop_reason

    def fail(self, error: Exception) -> RequestOutput | None:
        """End with an error; the last output says which."""
        self._text.clear()
        self.finish_reason = FinishReason.ERROR
        self.stop_reason = f"{type(error).__name__}: {error}"
        return self.make_output()

    def make_output(self) -> RequestOutput | None:
        """What is due to the asker now, if anything."""
        finished, count = self.finish_reason is not None, len(self.output_token_ids)
        if not finished and not self._is_due(count):
            return None
        text = "".join(self._text)
        is_delta = self._kind == RequestOutputKind.DELTA
        token_ids = self.output_token_ids[self._sent_tokens if is_delta else 0 :]
        self._text = [] if is_delta else [text]
        self._sent_tokens = count
        completion = CompletionOutput(
            index=self._index,
            text=text,
            token_ids=token_ids,
            num_output_tokens=count,
            logprobs=self._logprobs.take(delta_only=is_delta),
            cumulative_logprob=self._logprobs.cumulative,
            finish_reason=None if self.finish_reason is None else str(self.finish_reason),
            stop_reason=self.stop_reason,
        )
        return RequestOutput(
            request_id=self.external_req_id,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=[completion],
            finished=finished,
            prompt=self._prompt,
            num_cached_tokens=self.num_cached_tokens,
            prompt_logprobs=self._logprobs.pop_prompt_logprobs(delta_only=is_delta),
        )

    def _add_logprobs(self, token_id: int, told: TokenLogprobs, *, is_text: bool) -> str:
        """Keep the log probability of the next token with its place. Gives back its text; an end
        token is none."""
        if is_text:
            text, place, at_beginning = self._writer.write(token_id)
        else:
            text, place, at_beginning = "", self._machine.pending_chars, False
        self._logprobs.add(told, self._num_chars + place, at_beginning=at_beginning)
        return text

    def _append_text(self, text: str) -> bool:
        """Pass text by the stop strings; True if one of them ended the answer."""
        if not text:
            return False
        self._num_chars += len(text)
        self._text.append(self._stops.push(text, len(self.output_token_ids)))
        if self._stops.matched is None:
            return False
        self.finish_reason, self.stop_reason = FinishReason.STOP, self._stops.matched
        return True

    def _is_due(self, count: int) -> bool:
        """The first token at once, then every `stream_interval` tokens."""
        if self._kind == RequestOutputKind.FINAL_ONLY or count == self._sent_tokens:
            return False
        return self._sent_tokens == 0 or count - self._sent_tokens >= self._stream_interval


class OutputProcessor:
    """All requests of one asker (an ingress, or the in-process `LLM`)."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stream_interval: int = 1,
        stats: StatsSink | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request_states: dict[str, RequestState] = {}
        self._internal_ids: dict[str, list[str]] = {}
        """external id -> internal ids of its unfinished requests."""
        self._detokenizer = detokenizer
        self._texts = TokenTexts(detokenizer)
        self._stream_interval = stream_interval
        self._stats: StatsSink = stats or NoStats()
        self._clock = clock
        self._drained = asyncio.Event()
        self._drained.set()

    def has_unfinished_requests(self) -> bool:
        return bool(self.request_states)

    def get_num_unfinished_requests(self) -> int:
        return len(self.request_states)

    def add_request(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
        *,
        kind: RequestOutputKind = RequestOutputKind.DELTA,
        queue: RequestOutputCollector | None = None,
        prompt: str | None = None,
        index: int = 0,
        arrival_s: float | None = None,
        text_start: TextStart = TextStart.NEW_TEXT,
    ) -> RequestState:
        """Expect outputs of `request`. `prompt` is the text that was sent, if it was one;
        `arrival_s` is a reading of this processor's clock, where the request came earlier than
        this call."""
        assert request.request_id not in self.request_states, request.request_id
        assert not request.output_token_ids, "a resubmission keeps its first state"
        state = RequestState(
            request,
            params,
            self._detokenizer,
            self._texts,
            kind=kind,
            queue=queue,
            prompt=prompt,
            index=index,
            stream_interval=self._stream_interval,
            arrival_s=self._clock() if arrival_s is None else arrival_s,
            text_start=text_start,
        )
        self.request_states[request.request_id] = state
        self._internal_ids.setdefault(state.external_req_id, []).append(request.request_id)
        self._drained.clear()
        return state

    def sent(self, request_id: str) -> None:
        """An engine gets the request, for the first time or again: it waits for one no longer."""
        self.request_states[request_id].times.sent(self._clock())

    def process_outputs(self, outputs: Iterable[EngineCoreOutput]) -> OutputProcessorOutput:
        """Outputs of unknown requests are ignored: they were aborted or have ended here."""
        result = OutputProcessorOutput([], [])
        stats, now_s = IterationStats(), self._clock()
        for output in outputs:
            state = self.request_states.get(output.request_id)
            if state is None:
                continue
            # 1) statistics, 2) text and stops, 3) the asker's output, 4) the end.
            state.times.tokens(output, len(state.request.prompt_token_ids), now_s, stats)
            try:
                state.update(output)
                request_output = state.make_output()
            except Exception as error:  # a tokenizer's decoder may raise: its request alone ends
                request_output = state.fail(error)
            if request_output is not None:
                if state.queue is not None:
                    state.queue.put(request_output)
                else:
                    result.request_outputs.append(request_output)
            if state.finish_reason is not None:
                self._remove(state, now_s, stats)
                if not output.finished:
                    result.reqs_to_abort.append(state.request_id)
        self._stats.record(stats)
        return result

    def abort_requests(self, request_ids: Iterable[str], *, internal: bool) -> list[str]:
        """End requests for their asker, who gets what there is with finish reason `abort`.

        An external id stands for all its requests. Returns the internal ids to abort in the
        engines; unknown ids are ignored.
        """
        stats, now_s, aborted = IterationStats(), self._clock(), []
        for request_id in request_ids:
            for internal_id in [request_id] if internal else self.internal_ids(request_id):
                state = self.request_states.get(internal_id)
                if state is None:
                    continue
                state.finish(FinishReason.ABORT)
                request_output = state.make_output()
                if state.queue is not None and request_output is not None:
                    state.queue.put(request_output)
                self._remove(state, now_s, stats)
                aborted.append(internal_id)
        self._stats.record(stats)
        return aborted

    def internal_ids(self, external_req_id: str) -> list[str]:
        return list(self._internal_ids.get(external_req_id, ()))

    def propagate_error(
        self,
        error: Exception,
        request_ids: Iterable[str] | None = None,
        reason: FinishReason = FinishReason.ERROR,
    ) -> list[str]:
        """End the given requests (internal ids; None: all) with an exception, so that nobody
        waits for ever. Returns the internal ids that ended; `reason` is for statistics."""
        stats, now_s, ended = IterationStats(), self._clock(), []
        for request_id in list(self.request_states if request_ids is None else request_ids):
            state = self.request_states.get(request_id)
            if state is None:
                continue
            state.finish_reason = reason
            if state.queue is not None:
                state.queue.put(error)
            self._remove(state, now_s, stats)
            ended.append(request_id)
        self._stats.record(stats)
        return ended

    async def wait_for_requests_to_drain(self) -> None:
        """Return once no request is left."""
        while self.request_states:
            await self._drained.wait()

    def _remove(self, state: RequestState, now_s: float, stats: IterationStats) -> None:
        del self.request_states[state.request_id]
        siblings = self._internal_ids[state.external_req_id]
        siblings.remove(state.request_id)
        if not siblings:
            del self._internal_ids[state.external_req_id]
        if not self.request_states:
            self._drained.set()
        stats.finished.append(
            state.times.finish(
                str(state.finish_reason),
                len(state.request.prompt_token_ids),
                len(state.output_token_ids),
                now_s,
            )
        )
