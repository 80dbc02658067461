"""Base classes of writers of HTTP answers: what all APIs share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable

import msgspec
from msgspec import UNSET, UnsetType

from swell.cluster.api.answers.sse import comment, event
from swell.cluster.api.bodies.http_errors import (
    ENGINE_ERRORS,
    ErrorInfo,
    HTTPError,
    error_body,
    error_info,
)
from swell.cluster.api.bodies.protocol_base import Usage, usage
from swell.cluster.api.bodies.timings import Timings, timings_of
from swell.cluster.client.requests.merged_outputs import OutputBatch
from swell.cluster.client.requests.outputs import CompletionOutput, RequestOutput
from swell.cluster.client.requests.request_history import RequestRecord

ENGINES = "x-swell-engine"
"""The header that lists the ranks of the engines that served, in order."""
VERSION = "x-swell-version"
"""The header with the version of weights and limits that served."""
Batches = AsyncIterator[OutputBatch]


class AnswerWriter(ABC):
    """Writes one answer over one or more prompts. `full_response` makes the body of an answer that
    is not streamed."""

    operation = "chat"
    """The name of the operation in OpenTelemetry's conventions."""
    token_bytes = 1
    """The cost of writing one token of the answer, as a number of bytes of a request body that take
    the same time to decode."""
    has_abort_reason = False
    """Whether the API has a finish reason for an answer that was cancelled, which then has the
    output so far. Without one, a cancelled request fails."""

    def __init__(
        self,
        id: str,
        model: str,
        *,
        include_timings: bool | None = None,
        created: int | None = None,
    ) -> None:
        """`created` is in seconds since 1970; None: now."""
        self.id = id
        self.created = int(time.time()) if created is None else created
        self.model = model
        self.record: RequestRecord | None = None
        """The record of the request; None until the request is submitted."""
        self.failed = False
        """Whether the stream ended with an error."""
        self._include_timings = bool(include_timings)

    def begin(self, record: RequestRecord) -> None:
        """Continues with the record of the request, which was submitted."""
        self.record = record

    @abstractmethod
    def full_response(self, outputs: list[RequestOutput], usage: Usage) -> msgspec.Struct:
        """Returns the body. `outputs` has one element for each prompt, with its choices."""

    def timings(self) -> Timings | UnsetType:
        """Returns the timings of the request if the client asked for them."""
        if self.record is None or not self._include_timings:
            return UNSET
        return timings_of(self.record)


class ResponseWriter(AnswerWriter):
    """Writes one answer that may be streamed, over one or more prompts, each with `n` choices.

    Choice `prompt * n + k` is the k-th answer to a prompt. A stream consists of `stream_start`, one
    `delta` for each output, then `stream_end` or `stream_error`, and `stream_done`. The answer is
    committed before `stream_end` and `stream_done` are sent; the caller commits an answer that is
    not streamed.
    """

    def __init__(
        self,
        id: str,
        model: str,
        *,
        n: int = 1,
        include_timings: bool | None = None,
        created: int | None = None,
    ) -> None:
        super().__init__(id, model, include_timings=include_timings, created=created)
        self.n = n

    def stream_start(self, choices: int) -> Iterable[bytes]:
        """Returns the events before the first text."""
        return ()

    @abstractmethod
    def delta(self, choice: int, output: RequestOutput, part: CompletionOutput) -> Iterable[bytes]:
        """Returns the events for the new output of a choice."""

    async def complete_usage(self, usage: Usage) -> Usage:
        """Returns the usage of a successful stream, with the details that need its text."""
        return usage

    @abstractmethod
    def stream_end(self, usage: Usage) -> Iterable[bytes]:
        """Returns the last events of a successful stream."""

    def stream_error(self, error: ErrorInfo) -> Iterable[bytes]:
        """Returns the last events of a stream that failed."""
        yield event(error_body(error))

    async def commit(self, engines: str) -> None:
        """Stores what later requests may refer to: a client that has seen the end of the answer may
        send them. `engines` lists the engines that served. Raises HTTPError if the answer cannot be
        stored; a stream then ends with this error."""

    def stream_done(self) -> Iterable[bytes]:
        """Returns the very last event, after success or failure."""
        return ()

    async def stream(
        self, outputs: Batches, choices: int, *, sent_engines: str, engines: Callable[[], str]
    ) -> AsyncGenerator[bytes]:
        """Yields server-sent events; the events of one batch are sent together. `outputs` are
        deltas with the number of their choice. `sent_engines` is the value of the header that was
        sent. If `engines()` returns another value at the end, a comment lists the engines."""
        if begun := b"".join(self.stream_start(choices)):
            yield begun
        chunks: list[bytes] = []
        last: dict[int, RequestOutput] = {}
        try:
            async for batch in outputs:
                for choice, output in batch:
                    last[choice] = output
                    chunks += self.delta(choice, output, output.outputs[0])
                if chunks:
                    yield b"".join(chunks)
                    chunks = []
        except ENGINE_ERRORS as error:
            end = self._fail(error)
        else:
            end = [*self.stream_end(await self.complete_usage(stream_usage(last, self.n)))]
        try:
            await self.commit(engines())
        except HTTPError as error:
            end = self._fail(error)
        if engines() != sent_engines:
            end.append(comment(f"{ENGINES} {engines()}"))
        if ended := b"".join([*chunks, *end, *self.stream_done()]):
            yield ended

    def _fail(self, error: Exception) -> list[bytes]:
        self.failed = True
        return [*self.stream_error(error_info(error))]


def usage_of(outputs: Iterable[RequestOutput], completion_tokens: int) -> Usage:
    """Returns the usage of an answer. `outputs` has one element for each prompt. A prompt counts
    once, even if it has several choices."""
    outputs = list(outputs)
    return usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        completion_tokens,
        sum(output.num_cached_tokens for output in outputs),
    )


def choice_usage(output: RequestOutput) -> Usage:
    """Returns the usage of one choice of a stream so far."""
    return usage_of([output], output.outputs[0].num_output_tokens)


def stream_usage(last: dict[int, RequestOutput], n: int) -> Usage:
    """Returns the usage of a stream. `last` holds the last output of each choice."""
    completion_tokens = sum(output.outputs[0].num_output_tokens for output in last.values())
    return usage_of(
        (output for choice, output in last.items() if choice % n == 0), completion_tokens
    )
