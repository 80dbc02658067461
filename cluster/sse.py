"""Server-sent events of a stream, cheap: only the text of a chunk is encoded anew.

All chunks of one stream share id, time and model, so everything around the text is bytes made
once. The result is, byte for byte, what the typed chunks of `openai.responses` encode to.
"""

from __future__ import annotations

import msgspec

from swell.cluster.openai.responses import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    CompletionChunk,
    ErrorBody,
    Usage,
)

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.encode


def event(body: msgspec.Struct) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def comment(text: str) -> bytes:
    """A line that every reader of events skips, and a person or a script may read."""
    return f": {text}\n\n".encode()


def error_event(error: ErrorBody) -> bytes:
    """A failure after the stream has begun, when the status line is long gone."""
    return event(error)


class _Stream:
    """What completions and chat streams share. `text_key` stands around the text of a choice."""

    def __init__(self, kind: str, id: str, created: int, model: str, include_usage: bool) -> None:
        head = {"id": id, "object": kind, "created": created, "model": model}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":[{"index":'
        self._end = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._plain_tail = b',"logprobs":null,"finish_reason":null,"stop_reason":null' + self._end

    def _chunk(
        self,
        index: int,
        content: bytes,
        finish_reason: str | None,
        stop_reason: int | str | None,
        token_ids: list[int] | None,
    ) -> bytes:
        if finish_reason is None and token_ids is None:
            return b"%b%d,%b%b" % (self._head, index, content, self._plain_tail)
        ids = b"" if token_ids is None else b',"token_ids":' + _encode(token_ids)
        return b'%b%d,%b,"logprobs":null,"finish_reason":%b,"stop_reason":%b%b%b' % (
            self._head,
            index,
            content,
            _encode(finish_reason),
            _encode(stop_reason),
            ids,
            self._end,
        )


class CompletionStream(_Stream):
    """The events of one streamed `/v1/completions` answer."""

    def __init__(self, id: str, created: int, model: str, *, include_usage: bool = False) -> None:
        super().__init__("text_completion", id, created, model, include_usage)
        self._empty = CompletionChunk(id=id, created=created, model=model, choices=[])

    def chunk(
        self,
        text: str,
        *,
        index: int = 0,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        token_ids: list[int] | None = None,
    ) -> bytes:
        content = b'"text":' + _encode(text)
        return self._chunk(index, content, finish_reason, stop_reason, token_ids)

    def usage(self, usage: Usage) -> bytes:
        """The last event of a stream that asked for it: no choices."""
        return event(msgspec.structs.replace(self._empty, usage=usage))


class ChatStream(_Stream):
    """The events of one streamed `/v1/chat/completions` answer."""

    def __init__(self, id: str, created: int, model: str, *, include_usage: bool = False) -> None:
        super().__init__("chat.completion.chunk", id, created, model, include_usage)
        self._empty = ChatChunk(id=id, created=created, model=model, choices=[])
        self._usage_null = include_usage

    def role(self, *, index: int = 0) -> bytes:
        """The first event: who speaks."""
        choice = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
        chunk = msgspec.structs.replace(self._empty, choices=[choice])
        if self._usage_null:
            chunk.usage = None
        return event(chunk)

    def chunk(
        self,
        text: str,
        *,
        index: int = 0,
        finish_reason: str | None = None,
        stop_reason: int | str | None = None,
        token_ids: list[int] | None = None,
    ) -> bytes:
        content = b'"delta":{"content":' + _encode(text) + b"}"
        return self._chunk(index, content, finish_reason, stop_reason, token_ids)

    def usage(self, usage: Usage) -> bytes:
        """The last event of a stream that asked for it: no choices."""
        return event(msgspec.structs.replace(self._empty, usage=usage))
