"""Writes the answer to a chunk of a session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from swell.cluster.api.bodies.protocol_base import Usage
from swell.cluster.api.completions.protocol import CompletionRequest
from swell.cluster.api.completions.serving import CompletionResponseWriter
from swell.cluster.client.requests.outputs import CompletionOutput, RequestOutput

CommitChunk = Callable[[Sequence[int], str], Awaitable[None]]
"""Commits the tokens of an answer. The second argument is the header that lists the engines that
served it."""


class SessionChunkWriter(CompletionResponseWriter):
    """Commits the tokens of an answer, unless it failed: the next chunk continues after them."""

    def __init__(
        self, id: str, model: str, body: CompletionRequest, created: int, commit_chunk: CommitChunk
    ) -> None:
        super().__init__(id, model, body, created)
        self._answer_ids: list[int] = []
        self._commit_chunk = commit_chunk
        self._last: list[bytes] = []
        """The event with the finish reason, which many clients take for the end."""

    def full_response(self, outputs: list[RequestOutput], usage: Usage) -> msgspec.Struct:
        for output in outputs:
            self._answer_ids += self._shown(output.outputs[0]).token_ids
        return super().full_response(outputs, usage)

    def delta(self, choice: int, output: RequestOutput, part: CompletionOutput) -> Iterable[bytes]:
        self._answer_ids += self._shown(part).token_ids
        events = super().delta(choice, output, part)
        if part.finish_reason is None:
            return events
        self._last = [*events]
        return ()

    def stream_end(self, usage: Usage) -> Iterable[bytes]:
        return [*self._last, *super().stream_end(usage)]

    async def commit(self, engines: str) -> None:
        if not self.failed:
            await self._commit_chunk(self._answer_ids, engines)
