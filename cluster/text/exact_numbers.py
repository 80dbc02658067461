"""JSON numbers that no double holds, such as 0.1234567890123456789.

In a JSON schema every digit of a number is a constraint on the answer. So the untyped fields of a
body keep such a number as it was sent: an `ExactFloat`, which is a double for all code that does
not read its digits. All other numbers with a point or an exponent are read as plain floats,
whose `repr` is the same number.
"""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

_SHORT_CHARS = 16
"""A number of this length without an exponent has at most 15 digits, which every double holds."""


class ExactFloat(float):
    """A float that remembers the number it was read from; `repr` returns it. As a float it is the
    nearest double."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def read_float(text: str) -> float:
    """Returns the number that a JSON text with a point or an exponent means. Raises ValueError for
    one beyond all doubles."""
    value = float(text)
    if len(text) <= _SHORT_CHARS and "e" not in text and "E" not in text:
        return value
    if math.isinf(value):
        raise ValueError("Number out of range")
    return value if _is_exact(text, value) else ExactFloat(text)


def _is_exact(text: str, value: float) -> bool:
    written = repr(value)
    try:
        return written == text or Decimal(written) == Decimal(text)
    except InvalidOperation:  # an exponent beyond all decimals
        return False


_decoder = msgspec.json.Decoder(float_hook=read_float)


def decode_json(text: bytes | str | msgspec.Raw) -> Any:
    """Decodes JSON without rounding its numbers. Raises the errors of msgspec."""
    return _decoder.decode(text)


def encode_json(value: object) -> bytes:
    """Encodes JSON with all digits of its numbers."""
    return msgspec.json.encode(value, enc_hook=_written)


def _written(value: object) -> msgspec.Raw:
    if isinstance(value, ExactFloat):
        return msgspec.Raw(repr(value).encode())
    raise TypeError(f"JSON has no {type(value).__name__}")
