"""Server-sent events of a stream, cheap: only what is new in a chunk is encoded anew.

All chunks of one stream share id, time and model, so everything around the text is bytes made
once. The result is, byte for byte, what the typed chunks of `chat/` and `completions/` encode to.
"""

from __future__ import annotations

import msgspec

from swell.cluster.api.chat.protocol import ChatChunk, ChatDelta
from swell.cluster.api.completions.protocol import CompletionChunk
from swell.cluster.api.logprobs import ChatLogprobs, CompletionLogprobs
from swell.cluster.api.protocol_base import Usage

DONE = b"data: [DONE]\n\n"

_CLOSE = b"}\n\n"
"""The end of a chunk and of its event."""
_encode = msgspec.json.encode


class ChunkFields(msgspec.Struct, frozen=True):
    """What a chunk has beside its text."""

    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: ChatLogprobs | CompletionLogprobs | None = None
    token_ids: list[int] | None = None
    usage: Usage | None = None
    """Of the choice so far."""
    prompt_token_ids: list[int] | None = None


TEXT_ONLY = ChunkFields()
"""A chunk that is text alone."""


def event(body: msgspec.Struct) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def comment(text: str) -> bytes:
    """A line that every reader of events skips, and a person or a script may read."""
    return f": {text}\n\n".encode()


class _Stream:
    """What completions and chat streams share; `_kind` is the type of their chunks."""

    _kind: type[CompletionChunk] | type[ChatChunk]

    def __init__(self, id: str, created: int, model: str, *, include_usage: bool = False) -> None:
        self._empty = self._kind(id=id, created=created, model=model, choices=[])
        head = {"id": id, "object": self._empty.object, "created": created, "model": model}
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":[{"index":'
        self._end = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"
        self._text_only_tail = (
            b',"logprobs":null,"finish_reason":null,"stop_reason":null' + self._end
        )

    def _chunk(self, index: int, content: bytes, fields: ChunkFields) -> bytes:
        """`content` is the choice's text or delta with its key."""
        if fields is TEXT_ONLY:
            return b"%b%d,%b%b" % (self._head, index, content, self._text_only_tail)
        ids = b"" if fields.token_ids is None else b',"token_ids":' + _encode(fields.token_ids)
        if fields.prompt_token_ids is not None:
            ids += b',"prompt_token_ids":' + _encode(fields.prompt_token_ids)
        return b'%b%d,%b,"logprobs":%b,"finish_reason":%b,"stop_reason":%b%b%b' % (
            self._head,
            index,
            content,
            _encode(fields.logprobs),
            _encode(fields.finish_reason),
            _encode(fields.stop_reason),
            ids,
            self._end if fields.usage is None else b'}],"usage":%b}\n\n' % _encode(fields.usage),
        )

    def usage(self, usage: Usage) -> bytes:
        """The last event of a stream with `include_usage`: no choices."""
        return event(msgspec.structs.replace(self._empty, usage=usage))


class CompletionStream(_Stream):
    """The events of one streamed `/v1/completions` answer."""

    _kind = CompletionChunk

    def chunk(self, text: str, index: int = 0, fields: ChunkFields = TEXT_ONLY) -> bytes:
        return self._chunk(index, b'"text":' + _encode(text), fields)


class ChatStream(_Stream):
    """The events of one streamed `/v1/chat/completions` answer."""

    _kind = ChatChunk

    def role(
        self,
        index: int = 0,
        prompt_token_ids: list[int] | None = None,
        fields: ChunkFields = TEXT_ONLY,
    ) -> bytes:
        """The first event of a choice: who speaks. `prompt_token_ids` are the chunk's own."""
        event = self.delta(ChatDelta(role="assistant", content=""), index, fields)
        if prompt_token_ids is None:
            return event
        ids = b',"prompt_token_ids":' + _encode(prompt_token_ids)
        return event.removesuffix(_CLOSE) + ids + _CLOSE

    def chunk(self, text: str, index: int = 0, fields: ChunkFields = TEXT_ONLY) -> bytes:
        return self._chunk(index, b'"delta":{"content":' + _encode(text) + b"}", fields)

    def delta(self, delta: ChatDelta, index: int = 0, fields: ChunkFields = TEXT_ONLY) -> bytes:
        return self._chunk(index, b'"delta":' + _encode(delta), fields)
