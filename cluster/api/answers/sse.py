"""Encodes the server-sent events of a stream cheaply: only the new part of a chunk is encoded.

All chunks of one stream share id, time and model, so the bytes around the text are made once. The
result is byte for byte what `encode_line` makes of the typed chunks of `chat/` and
`completions/`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from swell.cluster.api.answers.logprobs import ChatLogprobs, CompletionLogprobs
from swell.cluster.api.bodies.protocol_base import Usage, encode_line
from swell.cluster.api.bodies.routed_experts import RoutedExpertsBody
from swell.cluster.api.bodies.timings import Timings

EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
"""A comment that is sent while a stream waits."""

_encode = encode_line


class ChunkFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of a chunk's choice after its text, in this order."""

    logprobs: ChatLogprobs | CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    routed_experts: RoutedExpertsBody | UnsetType = UNSET


TEXT_ONLY = ChunkFields()
"""The fields of a choice that has only text."""


def event(body: msgspec.Struct) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def comment(text: str) -> bytes:
    """Returns a comment line, which every event-stream reader skips, but a person or a script can
    read."""
    return f": {text}\n\n".encode()


class ChunkStream:
    """Encodes the events of one streamed answer. A subclass names the type of its chunks."""

    _kind: type[Any]
    """The type of the chunks."""
    _text: bytes
    """The field of a choice that holds text, with a `%b` placeholder for the text."""

    def __init__(self, id: str, created: int, model: str, *, include_usage: bool = False) -> None:
        self._empty = self._kind(id=id, created=created, model=model, choices=[])
        self._head = self._make_head()
        self._end = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._text_only_tail = b"," + _encode(TEXT_ONLY)[1:] + self._end

    def _make_head(self) -> bytes:
        """Returns the bytes before the index of a choice."""
        return b"data: " + _encode(self._empty).removesuffix(b"]}") + b'{"index":'

    def set_version(self, version: str) -> None:
        """Sets the version of the weights, once it is known; empty: unknown."""
        if version:
            self._empty = msgspec.structs.replace(self._empty, system_fingerprint=version)
            self._head = self._make_head()

    def chunk(
        self,
        text: str,
        index: int = 0,
        fields: ChunkFields = TEXT_ONLY,
        usage: Usage | None = None,
    ) -> bytes:
        """Encodes more text of a choice. `usage` is the usage of the choice so far."""
        return self._chunk(self._text % _encode(text), index, fields, usage)

    def _chunk(self, content: bytes, index: int, fields: ChunkFields, usage: Usage | None) -> bytes:
        if fields is TEXT_ONLY and usage is None:
            return b"%b%d,%b%b" % (self._head, index, content, self._text_only_tail)
        end = self._end if usage is None else b'],"usage":%b}\n\n' % _encode(usage)
        return b"%b%d,%b,%b%b" % (self._head, index, content, _encode(fields)[1:], end)

    def end(self, usage: Usage | UnsetType, timings: Timings | UnsetType = UNSET) -> list[bytes]:
        """Returns the last event of a stream with `include_usage` or `include_timings`, which has
        an empty list of choices."""
        if usage is UNSET and timings is UNSET:
            return []
        return [event(msgspec.structs.replace(self._empty, usage=usage, timings=timings))]
