"""One HTTP answer: what all shapes share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable

import msgspec

from swell.cluster.api.protocol_base import ErrorBody, ErrorDetail, Usage, usage
from swell.cluster.api.sse import comment, error_event
from swell.cluster.client.deadline import RequestTimedOut
from swell.cluster.client.merged_outputs import OutputBatch
from swell.cluster.client.outputs import CompletionOutput, RequestOutput
from swell.cluster.client.request_state import EngineGone, RequestFailed
from swell.cluster.client.router import NoEngine

ENGINES = "x-swell-engine"
"""The header that names the ranks that served, in order."""
_CODES: dict[type[Exception], str] = {
    EngineGone: "engine_failed",
    NoEngine: "no_engine",
    RequestFailed: "request_failed",
    RequestTimedOut: "request_timeout",
}

Batches = AsyncIterator[OutputBatch]


class ResponseWriter(ABC):
    """One answer over one or more prompts, each with `n` choices.

    Choice `prompt * n + k` is the k-th answer to a prompt. `whole` is the body of an answer that is
    not streamed; a stream is `opening`, what `delta` makes of each output, and `closing`.
    """

    def __init__(self, id: str, model: str, *, n: int = 1) -> None:
        self.id = id
        self.created = int(time.time())
        self.model = model
        self.n = n

    @abstractmethod
    def whole(self, outputs: list[RequestOutput], usage: Usage) -> msgspec.Struct:
        """`outputs`: one a prompt, with its choices."""

    def opening(self, choices: int) -> Iterable[bytes]:
        """Events before the first text."""
        return ()

    @abstractmethod
    def delta(self, choice: int, output: RequestOutput, part: CompletionOutput) -> Iterable[bytes]:
        """Events for what is new of a choice."""

    @abstractmethod
    def closing(self, usage: Usage) -> Iterable[bytes]:
        """The last events of a stream that went well."""

    def failure(self, error: Exception, code: str) -> Iterable[bytes]:
        """The last events of one that did not."""
        kind = "timeout_error" if isinstance(error, RequestTimedOut) else "server_error"
        detail = ErrorDetail(message=str(error), type=kind, code=code)
        yield error_event(ErrorBody(error=detail))

    def ending(self) -> Iterable[bytes]:
        """The very last event, however the stream went."""
        return ()

    async def events(
        self, outputs: Batches, choices: int, *, told: str, engines: Callable[[], str]
    ) -> AsyncGenerator[bytes]:
        """Server-sent events, as many together as there are at once; `outputs` are deltas with the
        number of their choice. Where `engines` are no longer those that the header `told`, a
        comment says so at the end."""
        chunks = [*self.opening(choices)]
        last: dict[int, RequestOutput] = {}
        try:
            async for batch in outputs:
                for choice, output in batch:
                    last[choice] = output
                    chunks += self.delta(choice, output, output.outputs[0])
                if chunks:
                    yield b"".join(chunks)
                    chunks = []
        except tuple(_CODES) as error:
            chunks += self.failure(error, _CODES[type(error)])
        else:
            chunks += self.closing(stream_usage(last, self.n))
        if engines() != told:
            chunks.append(comment(f"{ENGINES} {engines()}"))
        chunks += self.ending()
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
    """Of one choice of a stream so far."""
    return usage_of([output], output.outputs[0].num_output_tokens)


def stream_usage(last: dict[int, RequestOutput], n: int) -> Usage:
    """`last`: the last output of each choice."""
    completion_tokens = sum(output.outputs[0].num_output_tokens for output in last.values())
    return usage_of(
        (output for choice, output in last.items() if choice % n == 0), completion_tokens
    )
