"""Writes the answer of `/v1/responses`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from random import Random

from swell.cluster.api.answers.output_parts import make_part_reader
from swell.cluster.api.answers.response_writer import ResponseWriter
from swell.cluster.api.bodies.http_errors import ErrorInfo
from swell.cluster.api.bodies.protocol_base import Usage, named_event
from swell.cluster.api.responses import events
from swell.cluster.api.responses.events import Event
from swell.cluster.api.responses.output_items import OutputItemWriter
from swell.cluster.api.responses.response import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseBody,
    ResponseUsage,
)
from swell.cluster.client.requests.outputs import CompletionOutput, RequestOutput
from swell.cluster.text.parsers.base import Parser
from swell.cluster.text.random_ids import SYSTEM_RANDOM

_LAST = {
    "completed": events.Completed,
    "incomplete": events.Incomplete,
    "failed": events.Failed,
}


class ResponsesWriter(ResponseWriter):
    """Fills `response`, which has begun.

    Whole and streamed answers go through the same writer, so they have the same content. `finalize`
    commits a response that has ended. `top_logprobs` is that of `make_part_reader`; `random` is the
    source of the ids of items.
    """

    def __init__(
        self,
        response: ResponseBody,
        make_parser: Callable[[], Parser],
        finalize: Callable[[], Awaitable[None]],
        top_logprobs: int | None = None,
        *,
        include_timings: bool | None = None,
        random: Random = SYSTEM_RANDOM,
    ) -> None:
        super().__init__(response.id, response.model, include_timings=include_timings)
        self.response = response
        self._finalize = finalize
        self._read = make_part_reader(make_parser(), top_logprobs)
        self._writer = OutputItemWriter(response.output, random)
        self._sequence = 0

    def full_response(self, outputs: list[RequestOutput], usage: Usage) -> ResponseBody:
        """Returns the response."""
        (output,) = outputs
        for _ in self._write(output.outputs[0]):
            pass
        self._end(usage)
        return self.response

    def fail(self, error: ErrorInfo) -> None:
        """Ends the answer with an error. The output so far is kept, as incomplete."""
        for _ in self._writer.close("incomplete"):
            pass
        self.response.fail(error.message, error.status)

    async def commit(self, engines: str) -> None:
        await self._finalize()

    # ---------------------------------------------------------------- as a stream

    def stream_done(self) -> Iterable[bytes]:
        """Returns the event with the response, as it was committed."""
        yield self._event(_LAST[self.response.status](response=self.response))

    def stream_start(self, choices: int) -> Iterable[bytes]:
        if self._sequence:
            return  # they were sent before the first output
        yield self._event(events.Created(response=self.response))
        yield self._event(events.InProgress(response=self.response))

    def delta(self, choice: int, output: RequestOutput, part: CompletionOutput) -> Iterator[bytes]:
        yield from map(self._event, self._write(part))

    def stream_end(self, usage: Usage) -> Iterable[bytes]:
        self._end(usage)
        return ()

    def stream_error(self, error: ErrorInfo) -> Iterable[bytes]:
        self.fail(error)
        return ()

    # ---------------------------------------------------------------- whole and streamed answers

    def _write(self, part: CompletionOutput) -> Iterator[Event]:
        for said, logprobs in self._read(part):
            yield from self._writer.write(said, logprobs)
        if part.finish_reason is not None:
            cut = part.finish_reason == "length"
            yield from self._writer.finish("incomplete" if cut else "completed")
            self.response.status = "incomplete" if cut else "completed"

    def _end(self, usage: Usage) -> None:
        response = self.response
        if response.status == "incomplete":
            response.incomplete_details = IncompleteDetails()
        else:
            response.completed_at = int(time.time())
        response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=usage.prompt_tokens_details.cached_tokens
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(),
            total_tokens=usage.total_tokens,
        )
        response.timings = self.timings()

    def _event(self, event: Event) -> bytes:
        event.sequence_number = self._sequence
        self._sequence += 1
        return named_event(event)
