"""Writes the answer to a chunk of a session."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence

import msgspec

from swell.cluster.api.answers.response_writer import Batches
from swell.cluster.api.bodies.http_errors import HTTPError
from swell.cluster.api.bodies.protocol_base import Usage
from swell.cluster.api.completions.protocol import CompletionRequest
from swell.cluster.api.completions.serving import CompletionResponseWriter
from swell.cluster.client.requests.outputs import CompletionOutput, RequestOutput

Commit = Callable[[Sequence[int], str], Awaitable[None]]
"""Commits the tokens of an answer. The second argument is the header that lists the engines that
served it."""


class SessionChunkWriter(CompletionResponseWriter):
    """Awaits `commit` before the end of a stream is sent, because a client that has seen the end
    may send the next chunk. The caller commits the `answer_ids` of an answer that is not
    streamed."""

    def __init__(
        self, id: str, model: str, body: CompletionRequest, created: int, commit: Commit
    ) -> None:
        super().__init__(id, model, body, created)
        self.answer_ids: list[int] = []
        self._commit = commit
        self._usage: Usage | None = None
        self._last: list[bytes] = []
        """The event with the finish reason, which many clients take for the end."""

    def full_response(self, outputs: list[RequestOutput], usage: Usage) -> msgspec.Struct:
        for output in outputs:
            self.answer_ids += self._shown(output.outputs[0]).token_ids
        return super().full_response(outputs, usage)

    def delta(self, choice: int, output: RequestOutput, part: CompletionOutput) -> Iterable[bytes]:
        self.answer_ids += self._shown(part).token_ids
        events = super().delta(choice, output, part)
        if part.finish_reason is None:
            return events
        self._last = [*events]
        return ()

    async def stream(
        self, outputs: Batches, choices: int, *, sent_engines: str, engines: Callable[[], str]
    ) -> AsyncGenerator[bytes]:
        """Works like the base class, but commits the chunk before the end of the stream."""
        answer = super().stream(outputs, choices, sent_engines=sent_engines, engines=engines)
        async with contextlib.aclosing(answer):
            async for event in answer:
                yield event
        end: list[bytes] = []
        if self._usage is not None:
            try:
                await self._commit(self.answer_ids, engines())
            except HTTPError as error:
                self.failed = True
                end += self.stream_error(error.info)
            else:
                end += [*self._last, *super().stream_end(self._usage)]
        yield b"".join([*end, *super().stream_done()])

    def stream_end(self, usage: Usage) -> Iterable[bytes]:
        self._usage = usage
        return ()

    def stream_done(self) -> Iterable[bytes]:
        return ()
