"""Writes the answer of `/v1/completions`."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import UNSET

from swell.cluster.api.answers.logprobs import (
    CompletionLogprobs,
    completion_logprobs,
    prompt_logprobs_body,
)
from swell.cluster.api.answers.response_writer import ResponseWriter, choice_usage
from swell.cluster.api.answers.sse import DONE, ChunkFields, ChunkStream
from swell.cluster.api.bodies.protocol_base import Usage, usage
from swell.cluster.api.bodies.routed_experts import routed_experts_body
from swell.cluster.api.completions.protocol import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionRequest,
)
from swell.cluster.client.requests.outputs import CompletionOutput, RequestOutput


class CompletionStream(ChunkStream):
    """Encodes the events of one streamed `/v1/completions` answer."""

    _kind = CompletionChunk
    _text = b'"text":%b'


class CompletionResponseWriter(ResponseWriter):
    """Writes completions. With `echo` every choice begins with the text of its prompt."""

    operation = "text_completion"
    has_abort_reason = True

    def __init__(
        self, id: str, model: str, body: CompletionRequest, created: int | None = None
    ) -> None:
        super().__init__(
            id, model, n=body.n or 1, include_timings=body.include_timings, created=created
        )
        self._body = body
        self._stream = CompletionStream(
            self.id, self.created, model, include_usage=body.include_usage
        )
        self._echoed_chars: dict[int, int] = {}
        """Number of characters of the echo, for each choice of a stream that has begun."""
        self._extra_fields_per_chunk = (
            body.return_token_ids or body.logprobs is not None or body.continuous_usage
        )
        """Whether every chunk has more fields than its text."""

    def full_response(self, outputs: list[RequestOutput], usage: Usage) -> msgspec.Struct:
        choices = [
            self._choice(place * self.n + part.index, output, part)
            for place, output in enumerate(outputs)
            for part in output.outputs
        ]
        return Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=self._shown_usage(usage),
            system_fingerprint=outputs[0].version or None,
            timings=self.timings(),
        )

    def _choice(
        self, index: int, output: RequestOutput, part: CompletionOutput
    ) -> CompletionChoice:
        body = self._body
        part = self._shown(part)
        prompt = self._echo(output)
        table = None if body.prompt_logprobs is None else output.prompt_logprobs
        return CompletionChoice(
            index=index,
            text=prompt + part.text,
            logprobs=self._logprobs(output, part, len(prompt)),
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
            token_ids=part.token_ids if body.return_token_ids else None,
            prompt_token_ids=output.prompt_token_ids if body.return_token_ids else None,
            prompt_logprobs=None if table is None else prompt_logprobs_body(table),
            routed_experts=routed_experts_body(part.routed_experts),
        )

    def delta(self, choice: int, output: RequestOutput, part: CompletionOutput) -> Iterable[bytes]:
        """Returns the events of a new output. With `echo` the first chunk begins with the
        prompt."""
        body, part = self._body, self._shown(part)
        begins = choice not in self._echoed_chars
        prompt = ""
        if begins:
            if not self._echoed_chars:
                self._stream.set_version(output.version)
            prompt = self._echo(output)
            self._echoed_chars[choice] = len(prompt)
        if part.finish_reason is None and not self._extra_fields_per_chunk:
            return [self._stream.chunk(prompt + part.text, choice)]
        has_ids = bool(body.return_token_ids)
        fields = ChunkFields(
            logprobs=self._logprobs(output, part, self._echoed_chars[choice]),
            finish_reason=part.finish_reason,
            stop_reason=part.stop_reason,
            token_ids=part.token_ids if has_ids else UNSET,
            prompt_token_ids=output.prompt_token_ids if has_ids and begins else UNSET,
            routed_experts=routed_experts_body(part.routed_experts),
        )
        usage = self._shown_usage(choice_usage(output)) if body.continuous_usage else None
        return [self._stream.chunk(prompt + part.text, choice, fields, usage)]

    def _echo(self, output: RequestOutput) -> str:
        """Returns the text that every answer to a prompt begins with."""
        return (output.prompt or "") if self._body.echo else ""

    def _logprobs(
        self, output: RequestOutput, part: CompletionOutput, echoed_chars: int
    ) -> CompletionLogprobs | None:
        """Returns the log probabilities of an output. In a stream, only the first output has those
        of the prompt."""
        if self._body.logprobs is None or part.logprobs is None:
            return None
        return completion_logprobs(
            part.logprobs,
            self._body.logprobs,
            by_id=bool(self._body.return_tokens_as_token_ids),
            echo=output.prompt_logprobs if self._body.echo else None,
            echoed_chars=echoed_chars,
        )

    def _shown(self, part: CompletionOutput) -> CompletionOutput:
        """Removes the one token that had to be sampled if no answer is requested."""
        if not self._body.has_no_answer:
            return part
        none = None if part.logprobs is None else part.logprobs[:0]
        return msgspec.structs.replace(
            part, text="", token_ids=[], logprobs=none, finish_reason="length", stop_reason=None
        )

    def _shown_usage(self, whole: Usage) -> Usage:
        if not self._body.has_no_answer:
            return whole
        return usage(whole.prompt_tokens, 0, whole.prompt_tokens_details.cached_tokens)

    def stream_end(self, usage: Usage) -> Iterable[bytes]:
        shown = self._shown_usage(usage) if self._body.include_usage else UNSET
        return self._stream.end(shown, self.timings())

    def stream_done(self) -> Iterable[bytes]:
        yield DONE
