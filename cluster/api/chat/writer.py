"""Writes the answer of `/v1/chat/completions`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET

from swell.cluster.api.answers.logprobs import ChatLogprobs, chat_logprobs, prompt_logprobs_body
from swell.cluster.api.answers.output_parts import PartReader
from swell.cluster.api.answers.response_writer import ResponseWriter, choice_usage, usage_of
from swell.cluster.api.answers.sse import DONE, TEXT_ONLY, ChunkFields, ChunkStream
from swell.cluster.api.bodies.protocol_base import CompletionTokensDetails, Usage, encode_line
from swell.cluster.api.bodies.routed_experts import routed_experts_body
from swell.cluster.api.chat.protocol import (
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatCompletionRequest,
    ChatDelta,
    ChatResponseMessage,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
)
from swell.cluster.client.requests.outputs import CompletionOutput, RequestOutput
from swell.cluster.text.parsers import deltas as parts
from swell.cluster.text.parsers.base import Parser
from swell.cluster.text.schema.chat_messages import call_rules


class ReasoningCounter(Protocol):
    """Counts the tokens of reasoning texts, like `AsyncInputProcessor`."""

    def reasoning_tokens(self, texts: Sequence[str], most: int) -> int: ...

    async def reasoning_tokens_offloaded(self, texts: Sequence[str], most: int) -> int: ...


_CLOSE = b"}\n\n"
"""The end of a chunk and of its event."""


class ChatStream(ChunkStream):
    """Encodes the events of one streamed `/v1/chat/completions` answer."""

    _kind = ChatChunk
    _text = b'"delta":{"content":%b}'

    def role(
        self,
        index: int = 0,
        prompt_token_ids: list[int] | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """Encodes the first event of a choice: its role. `prompt_token_ids` is a field of the chunk
        itself."""
        event = self.delta(ChatDelta(role="assistant", content=""), index, TEXT_ONLY, usage)
        if prompt_token_ids is None:
            return event
        ids = b',"prompt_token_ids":' + encode_line(prompt_token_ids)
        return event.removesuffix(_CLOSE) + ids + _CLOSE

    def delta(
        self, delta: ChatDelta, index: int, fields: ChunkFields, usage: Usage | None = None
    ) -> bytes:
        return self._chunk(b'"delta":' + encode_line(delta), index, fields, usage)


class ChatResponseWriter(ResponseWriter):
    """Writes chat answers. `make_parser` makes the parser of one choice."""

    token_bytes = 4
    """Higher than the default because reasoning is tokenized again."""
    has_abort_reason = True

    def __init__(
        self,
        id: str,
        model: str,
        body: ChatCompletionRequest,
        make_parser: Callable[[], Parser],
        *,
        counter: ReasoningCounter,
        created: int | None = None,
    ) -> None:
        super().__init__(
            id, model, n=body.n or 1, include_timings=body.include_timings, created=created
        )
        self._body = body
        self._make_parser = make_parser
        self._readers: dict[int, PartReader] = {}
        self._counter = counter
        self._reasoning: defaultdict[int, list[str]] = defaultdict(list)
        """The reasoning texts of each choice, if reasoning tokens are counted."""
        self._counts_reasoning = body.include_usage or not body.stream
        self._called: set[int] = set()
        """The choices with a tool call."""
        self._echoed = body.echoed
        self._hides_reasoning = body.include_reasoning is False
        self._continuous_usage = body.continuous_usage
        self._counted: defaultdict[int, int] = defaultdict(int)
        """Maps each choice to the tokens of its reasoning so far, if each chunk has usage."""
        self._read_tokens: defaultdict[int, int] = defaultdict(int)
        """Maps each choice to the number of its tokens up to its last text of reasoning."""
        self._extra_fields_per_chunk = body.return_token_ids or body.continuous_usage
        """Whether every output has more fields than text."""
        self._stream = ChatStream(self.id, self.created, model, include_usage=body.include_usage)

    def full_response(self, outputs: list[RequestOutput], usage: Usage) -> msgspec.Struct:
        (output,) = outputs
        body, prompt = self._body, output.prompt_logprobs
        choices = [self._choice(part) for part in output.outputs]
        count = self._counter.reasoning_tokens(self._reasoning_texts(), usage.completion_tokens)
        return ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=_with_reasoning(usage, count),
            system_fingerprint=output.version or None,
            prompt_token_ids=output.prompt_token_ids if body.return_token_ids else None,
            prompt_logprobs=None if prompt is None else prompt_logprobs_body(prompt),
            timings=self.timings(),
        )

    def _choice(self, part: CompletionOutput) -> ChatChoice:
        parsed = parts.collect(self._visible_parts(PartReader(self._make_parser()), part))
        calls = [
            ToolCall(id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments))
            for call in parsed.tool_calls
        ]
        content = parsed.content if calls or parsed.reasoning else parsed.content or ""
        if self._echoed:
            content = self._echoed + (content or "")
        message = ChatResponseMessage(
            content=content,
            reasoning_content=parsed.reasoning,
            reasoning=parsed.reasoning,
            tool_calls=calls or UNSET,
        )
        return ChatChoice(
            index=part.index,
            message=message,
            logprobs=self._logprobs(part),
            finish_reason=self._reason(part, called=bool(calls)),
            stop_reason=part.stop_reason,
            token_ids=part.token_ids if self._body.return_token_ids else None,
            routed_experts=routed_experts_body(part.routed_experts),
        )

    def _visible_parts(self, reader: PartReader, part: CompletionOutput) -> list[parts.AnswerDelta]:
        """Returns the parts of an output that the client receives."""
        parsed = reader.read(part)
        if self._counts_reasoning:
            said = [one.text for one in parsed if isinstance(one, parts.Reasoning)]
            self._reasoning[part.index] += said
            if self._continuous_usage and any(said):
                self._count_so_far(part, "".join(said))
        if not self._hides_reasoning:
            return parsed
        return [one for one in parsed if not isinstance(one, parts.Reasoning)]

    def _count_so_far(self, part: CompletionOutput, said: str) -> None:
        """Counts the tokens of a piece of reasoning, at most those since the last piece."""
        choice, num_tokens = part.index, part.num_output_tokens
        most = num_tokens - self._read_tokens[choice]
        self._counted[choice] += self._counter.reasoning_tokens([said], most)
        self._read_tokens[choice] = num_tokens

    def _reasoning_texts(self) -> list[str]:
        return ["".join(said) for said in self._reasoning.values()]

    # ---------------------------------------------------------------- as a stream

    def delta(self, choice: int, output: RequestOutput, part: CompletionOutput) -> Iterable[bytes]:
        if not self._readers:
            return [*self._begin(output), *self.delta(choice, output, part)]
        parsed = self._visible_parts(self._readers[choice], part)
        for one in parsed:
            if isinstance(one, parts.ToolCall):
                self._called.add(choice)
        usage = None
        if self._continuous_usage:
            usage = _with_reasoning(choice_usage(output), self._counted[choice])
        if part.finish_reason is not None:
            return self._last_events(choice, part, parsed, usage)
        fields = self._data_fields(part)
        if not parsed:
            return [] if fields is TEXT_ONLY else [self._stream.chunk("", choice, fields, usage)]
        return self._events(choice, parsed, fields, usage)

    def _last_events(
        self,
        choice: int,
        part: CompletionOutput,
        parsed: list[parts.AnswerDelta],
        usage: Usage | None,
    ) -> list[bytes]:
        """Returns the last events of a choice. As in OpenAI's API, the last chunk has an empty
        delta and the finish reason."""
        data = self._data_fields(part)
        events = self._events(choice, parsed, data, usage) if parsed else []
        if parsed:
            data = ChunkFields(token_ids=[]) if self._body.return_token_ids else TEXT_ONLY
        end = msgspec.structs.replace(
            data,
            finish_reason=self._reason(part, called=choice in self._called),
            stop_reason=part.stop_reason,
            routed_experts=routed_experts_body(part.routed_experts),
        )
        return [*events, self._stream.delta(ChatDelta(), choice, end, usage)]

    def _events(
        self,
        choice: int,
        parsed: list[parts.AnswerDelta],
        fields: ChunkFields,
        usage: Usage | None,
    ) -> list[bytes]:
        """Returns one event for each part; the last one carries `fields`."""
        *before, last = parsed
        event = self._event(choice, last, fields, usage)
        if not before:
            return [event]
        return [*(self._event(choice, one, TEXT_ONLY, usage) for one in before), event]

    def _begin(self, output: RequestOutput) -> Iterable[bytes]:
        """Yields the first event, with the role, of each choice. All choices answer one prompt,
        whose token ids are sent with the first one."""
        self._stream.set_version(output.version)
        ids = output.prompt_token_ids if self._body.return_token_ids else None
        usage = _with_reasoning(usage_of([output], 0), 0) if self._continuous_usage else None
        for choice in range(self.n):
            self._readers[choice] = PartReader(self._make_parser())
            yield self._stream.role(choice, ids if choice == 0 else None, usage)
            if self._echoed:
                yield self._stream.chunk(self._echoed, choice, TEXT_ONLY, usage)

    def _event(
        self, choice: int, part: parts.AnswerDelta, fields: ChunkFields, usage: Usage | None
    ) -> bytes:
        if isinstance(part, parts.Content):  # nearly always
            return self._stream.chunk(part.text, choice, fields, usage)
        match part:
            case parts.Reasoning(text):
                delta = ChatDelta(reasoning_content=text)
            case parts.ToolCall(index, id, name):
                function = FunctionDelta(name=name, arguments="")
                call = ToolCallDelta(index=index, id=id, type="function", function=function)
                delta = ChatDelta(tool_calls=[call])
            case parts.Arguments(index, text):
                call = ToolCallDelta(index=index, function=FunctionDelta(arguments=text))
                delta = ChatDelta(tool_calls=[call])
        return self._stream.delta(delta, choice, fields, usage)

    def _data_fields(self, part: CompletionOutput) -> ChunkFields:
        """Returns the fields that the last event of an output carries in addition to its text."""
        if part.logprobs is None and not self._extra_fields_per_chunk:
            return TEXT_ONLY
        return ChunkFields(
            logprobs=self._logprobs(part),
            token_ids=part.token_ids if self._body.return_token_ids else UNSET,
        )

    def _logprobs(self, part: CompletionOutput) -> ChatLogprobs | None:
        if part.logprobs is None:
            return None
        by_id = bool(self._body.return_tokens_as_token_ids)
        return chat_logprobs(part.logprobs, self._body.top_logprobs or 0, by_id=by_id)

    def _reason(self, part: CompletionOutput, *, called: bool) -> str | None:
        """Returns the finish reason. As in OpenAI's API, it is `tool_calls` if the model chose to
        call, and `stop` if it was forced to."""
        chose = called and not call_rules(self._body.tool_choice).single
        return "tool_calls" if chose and part.finish_reason == "stop" else part.finish_reason

    async def complete_usage(self, usage: Usage) -> Usage:
        if not self._counts_reasoning:
            return usage
        count = self._counter.reasoning_tokens_offloaded
        texts = self._reasoning_texts()
        return _with_reasoning(usage, await count(texts, usage.completion_tokens))

    def stream_end(self, usage: Usage) -> Iterable[bytes]:
        return self._stream.end(usage if self._body.include_usage else UNSET, self.timings())

    def stream_done(self) -> Iterable[bytes]:
        yield DONE


def _with_reasoning(usage: Usage, count: int) -> Usage:
    details = CompletionTokensDetails(reasoning_tokens=count)
    return msgspec.structs.replace(usage, completion_tokens_details=details)
