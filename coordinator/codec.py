"""Messages as frames, and back: msgpack of tagged Structs.

**What is default at the end of a message does not travel.** msgspec gives an array-like Struct an
element for each of its fields, and its `omit_defaults` does nothing there. `encode` does: a Struct
that sets it ends with the last field that is not default, and so does one that is a field of such
a Struct. Every decoder puts the defaults back, as it does for fields that an older sender lacks.

    EngineCoreRequest   request_id  prompt_token_ids  sampler  max_tokens | min_tokens  ...
                                                                          ^ all default: not sent

So fields are only ever appended, and a default never changes: it is the reader's.

Elements of lists travel whole. To find the defaults of one costs Python some 1 us and saves its
sender and its reader 0.1: that may be spent once for a request, not for each row of each step.
"""

from __future__ import annotations

import functools
from typing import Any, Generic, TypeVar

import msgspec

from swell.configs.log import StructuredLogger

M = TypeVar("M")

_encode = msgspec.msgpack.Encoder().encode


def encode(message: Any) -> bytes:
    """The frame of a message."""
    return _encode(_without_defaults(message))


def _without_defaults(value: Any) -> Any:
    """The tag and the fields of a Struct with `omit_defaults`, up to the last one that is not
    default; any other value as it is."""
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
    """(tag, if it has one; defaults of its fields, from the last field on) of an array-like Struct
    with `omit_defaults`; None for any other type."""
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
    """One for all ends: it holds nothing of a frame."""
    return msgspec.msgpack.Decoder(message_type)


class FrameDecoder(Generic[M]):
    """The typed decoder of one end, which counts what it could not decode: a frame of a peer of
    another build, or of one that is broken, is dropped and harms no other."""

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
