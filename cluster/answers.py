"""Answers in the two shapes of the API: completions and chat, whole or as a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator

import msgspec

from swell.cluster.openai import responses as api
from swell.cluster.outputs import CompletionOutput, RequestOutput
from swell.cluster.routing.router import NoEngine
from swell.cluster.sse import DONE, ChatStream, CompletionStream, comment, error_event
from swell.cluster.tickets import EngineGone

ENGINES = "x-swell-engine"
"""The header that names the ranks that served, in order."""
_CODES = {EngineGone: "engine_failed", NoEngine: "no_engine"}


class Answer(ABC):
    """One HTTP answer over one or more prompts; choice k answers prompt k."""

    def __init__(
        self, prefix: str, model: str, *, include_usage: bool, return_token_ids: bool
    ) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self._include_usage = include_usage
        self._return_token_ids = return_token_ids

    @abstractmethod
    def whole(self, outputs: list[RequestOutput]) -> msgspec.Struct:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def _opening(self, choices: int) -> Iterator[bytes]:
        """Events before the first text."""

    @abstractmethod
    def _stream(self) -> CompletionStream | ChatStream: ...

    async def events(
        self,
        outputs: AsyncIterator[tuple[int, RequestOutput]],
        choices: int,
        *,
        told: str,
        engines: Callable[[], str],
    ) -> AsyncGenerator[bytes]:
        """Server-sent events; `outputs` are deltas with the index of their prompt. Where
        `engines` are no longer those that the header `told`, a comment says so at the end."""
        stream = self._stream()
        for event in self._opening(choices):
            yield event
        last: dict[int, RequestOutput] = {}
        failed = False
        try:
            async for index, output in outputs:
                last[index] = output
                part = checked(output)
                yield stream.chunk(
                    part.text,
                    index=index,
                    finish_reason=part.finish_reason,
                    stop_reason=part.stop_reason,
                    token_ids=part.token_ids if self._return_token_ids else None,
                )
        except (EngineGone, NoEngine) as error:
            failed = True
            detail = api.ErrorDetail(
                message=str(error), type="server_error", code=_CODES[type(error)]
            )
            yield error_event(api.ErrorBody(error=detail))
        if self._include_usage and not failed:
            yield stream.usage(usage_of(list(last.values())))
        if engines() != told:
            yield comment(f"{ENGINES} {engines()}")
        yield DONE

    def _ids(self, ids: list[int]) -> list[int] | msgspec.UnsetType:
        return ids if self._return_token_ids else msgspec.UNSET


class CompletionAnswer(Answer):
    def _opening(self, choices: int) -> Iterator[bytes]:
        return iter(())

    def _stream(self) -> CompletionStream:
        return CompletionStream(
            self.id, self.created, self.model, include_usage=self._include_usage
        )

    def whole(self, outputs: list[RequestOutput]) -> msgspec.Struct:
        choices = []
        for index, output in enumerate(outputs):
            part = checked(output)
            choices.append(
                api.CompletionChoice(
                    index=index,
                    text=part.text,
                    finish_reason=part.finish_reason,
                    stop_reason=part.stop_reason,
                    token_ids=self._ids(part.token_ids),
                    prompt_token_ids=self._ids(output.prompt_token_ids),
                )
            )
        return api.Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage_of(outputs),
        )


class ChatAnswer(Answer):
    def _opening(self, choices: int) -> Iterator[bytes]:
        stream = self._stream()
        return (stream.role(index=index) for index in range(choices))

    def _stream(self) -> ChatStream:
        return ChatStream(self.id, self.created, self.model, include_usage=self._include_usage)

    def whole(self, outputs: list[RequestOutput]) -> msgspec.Struct:
        choices = []
        for index, output in enumerate(outputs):
            part = checked(output)
            choices.append(
                api.ChatChoice(
                    index=index,
                    message=api.ChatResponseMessage(content=part.text),
                    finish_reason=part.finish_reason,
                    stop_reason=part.stop_reason,
                    token_ids=self._ids(part.token_ids),
                )
            )
        return api.ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage_of(outputs),
            prompt_token_ids=self._ids(outputs[0].prompt_token_ids),
        )


def checked(output: RequestOutput) -> CompletionOutput:
    """The one answer of an output. Raises EngineGone where the engine could not give it."""
    part = output.outputs[0]
    if part.finish_reason == "error":
        raise EngineGone(str(part.stop_reason or "the engine failed"))
    return part


def usage_of(outputs: list[RequestOutput]) -> api.Usage:
    return api.usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(output.outputs[0].num_output_tokens for output in outputs),
        sum(output.num_cached_tokens for output in outputs),
    )
