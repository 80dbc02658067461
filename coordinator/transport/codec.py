"""Encodes messages as frames and decodes them: msgpack of tagged Structs.

**Trailing fields with default values are not sent.** msgspec encodes each field of an array-like
Struct as an element, and ignores `omit_defaults` there. `encode` implements it: a Struct that sets
`omit_defaults` is cut after its last non-default field, and so is such a Struct in a field of
another one. Every decoder restores the defaults, as it does for fields that an older sender lacks.

    EngineCoreRequest   request_id  prompt_token_ids  sampler  max_tokens | min_tokens  ...
                                                                          ^ all default: not sent

Therefore new fields must be appended, and a default must never change: the reader applies its own.

Elements of lists are sent whole. Finding the defaults of an element takes about 1 us in Python and
saves its sender and its reader 0.1 us. This may be spent once per request, but not for each row of
each step.
"""

from __future__ import annotations

import functools
from typing import Any, Generic, TypeVar

import msgspec

from swell.configs.runtime.log import StructuredLogger

M = TypeVar("M")

_encode = msgspec.msgpack.Encoder().encode


def encode(message: Any) -> bytes:
    """Encodes a message as a frame."""
    return _encode(_without_defaults(message))


def _without_defaults(value: Any) -> Any:
    """Returns the tag and the fields of a Struct with `omit_defaults`, up to the last non-default
    field; returns any other value unchanged."""
    kind: Any = type(value)
    shape = _shape_of(kind)
    if shape is None:
        return value
    tag, defaults = shape
    fields = msgspec.structs.astuple(value)
    count = len(fields)
    for default in defaults:
        if fields[count - 1] != default:
            break
        count -= 1
    return [*tag, *map(_without_defaults, fields[:count])]


@functools.cache
def _shape_of(kind: type) -> tuple[list[Any], list[Any]] | None:
    """Returns (tag, if there is one; defaults of the fields, from the last field on) of an
    array-like Struct with `omit_defaults`, or None for any other type."""
    if not issubclass(kind, msgspec.Struct):
        return None
    config = kind.__struct_config__
    if not (config.array_like and config.omit_defaults):
        return None
    fields = [field for field in msgspec.structs.fields(kind) if not field.required]
    defaults = [
        field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        for field in reversed(fields)
    ]
    return [] if config.tag is None else [config.tag], defaults


@functools.cache
def _decoder_of(message_type: Any) -> msgspec.msgpack.Decoder[Any]:
    """Returns a decoder that all sockets share: it holds no state of a frame."""
    return msgspec.msgpack.Decoder(message_type)


class FrameDecoder(Generic[M]):
    """The typed decoder of one socket, which counts the frames that it could not decode. A frame of
    a broken peer, or of a peer with another build, is dropped and does not affect other frames."""

    def __init__(self, message_type: Any) -> None:
        self.malformed = 0
        self._decoder: msgspec.msgpack.Decoder[M] = _decoder_of(message_type)
        self._log = StructuredLogger("coordinator.channel")

    def decode(self, frame: bytes) -> M | None:
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self.malformed += 1
            if self.malformed.bit_count() == 1:  # the first, the second, the fourth ...
                what = f"{type(error).__name__}: {error}"
                self._log.warning("frame dropped", malformed=self.malformed, error=what)
            return None
