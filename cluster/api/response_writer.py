"""One HTTP answer: what all shapes share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable

import msgspec
from msgspec import UNSET, UnsetType

from swell.cluster.api.http_errors import ENGINE_ERRORS, ErrorInfo, error_body, error_info
from swell.cluster.api.protocol_base import Usage, usage
from swell.cluster.api.sse import comment, event
from swell.cluster.api.timings import Timings, timings_of
from swell.cluster.client.merged_outputs import OutputBatch
from swell.cluster.client.outputs import CompletionOutput, RequestOutput
from swell.cluster.client.request_history import RequestRecord

ENGINES = "x-swell-engine"
"""The header that names the ranks that served, in order."""
VERSION = "x-swell-version"
"""The header that names the version of weights and limits that served."""
Batches = AsyncIterator[OutputBatch]


class AnswerWriter(ABC):
    """One answer over one or more prompts: its body, `full_response`, where it is not streamed."""

    operation = "chat"
    """As OpenTelemetry's conventions name it."""
    token_bytes = 1
    """So many bytes of a body are read in the time in which a token of the answer is written."""

    def __init__(
        self,
        id: str,
        model: str,
        *,
        include_timings: bool | None = None,
        created: int | None = None,
    ) -> None:
        """`created`: None: now."""
        self.id = id
        self.created = int(time.time()) if created is None else created
        self.model = model
        self.record: RequestRecord | None = None
        """What happens to the request; None before it is submitted."""
        self.failed = False
        """The stream ended with an error."""
        self._include_timings = bool(include_timings)

    @abstractmethod
    def full_response(self, outputs: list[RequestOutput], usage: Usage) -> msgspec.Struct:
        """`outputs`: one a prompt, with its choices."""

    def timings(self) -> Timings | UnsetType:
        """What has happened to the request, if its client wants to know it."""
        if self.record is None or not self._include_timings:
            return UNSET
        return timings_of(self.record)


class ResponseWriter(AnswerWriter):
    """One answer that may be streamed, over one or more prompts, each with `n` choices.

    Choice `prompt * n + k` is the k-th answer to a prompt. A stream is `stream_start`, `delta` of
    each output, then `stream_end` or `stream_error`, and `stream_done`.
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
        """Events before the first text."""
        return ()

    @abstractmethod
    def delta(self, choice: int, output: RequestOutput, part: CompletionOutput) -> Iterable[bytes]:
        """Events for the new output of a choice."""

    async def complete_usage(self, usage: Usage) -> Usage:
        """The usage of a stream that went well, with what its text says about it."""
        return usage

    @abstractmethod
    def stream_end(self, usage: Usage) -> Iterable[bytes]:
        """The last events of a stream that went well."""

    def stream_error(self, error: ErrorInfo) -> Iterable[bytes]:
        """The last events of one that did not."""
        yield event(error_body(error))

    def stream_done(self) -> Iterable[bytes]:
        """The very last event, however the stream went."""
        return ()

    async def stream(
        self, outputs: Batches, choices: int, *, sent_engines: str, engines: Callable[[], str]
    ) -> AsyncGenerator[bytes]:
        """Server-sent events, as many together as there are at once; `outputs` are deltas with the
        number of their choice. `sent_engines` is the header that was sent; where `engines` has
        changed since, a comment names them at the end."""
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
            self.failed = True
            chunks += self.stream_error(error_info(error))
        else:
            chunks += self.stream_end(await self.complete_usage(stream_usage(last, self.n)))
        if engines() != sent_engines:
            chunks.append(comment(f"{ENGINES} {engines()}"))
        chunks += self.stream_done()
        if chunks:
            yield b"".join(chunks)


def usage_of(outputs: Iterable[RequestOutput], completion_tokens: int) -> Usage:
    """`outputs`: one a prompt. A prompt counts once, however many answers it has."""
    outputs = list(outputs)
    return usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        completion_tokens,
        sum(output.num_cached_tokens for output in outputs),
    )


def choice_usage(output: RequestOutput) -> Usage:
    """The usage of one choice of a stream so far."""
    return usage_of([output], output.outputs[0].num_output_tokens)


def stream_usage(last: dict[int, RequestOutput], n: int) -> Usage:
    """`last`: the last output of each choice."""
    completion_tokens = sum(output.outputs[0].num_output_tokens for output in last.values())
    return usage_of(
        (output for choice, output in last.items() if choice % n == 0), completion_tokens
    )
