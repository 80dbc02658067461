"""Estimates the work to parse a JSON text, before it is parsed.

Parsing is a single call that holds the interpreter's lock, so nothing else in the process runs
meanwhile. How long it takes depends more on the content than on the length. Measured with 16 MiB: a
text that is one string takes 15 ms, one of empty arrays 2 s, and one of numbers like 1e300 40 s. So
the parts of a text are counted first, in slices that let other threads run, and a text that would
take more than about 50 ms is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from swell.cluster.text.errors import BadRequest

COUNTED_BYTES = 8 * 1024
"""A shorter text is parsed without counting: it takes some milliseconds for any content."""
MAX_VALUES = 512 * 1024
"""Maximum number of values of all kinds: the token ids of four prompts of 128k tokens."""
MAX_NODES = 128 * 1024
"""Maximum number of arrays, objects, strings and keys."""
MAX_ESCAPES = 1024 * 1024
"""Maximum number of backslashes in strings. Writers that escape non-ASCII characters need one for
each, and two for those beyond U+FFFF."""
MAX_SLOW_NUMBERS = 2048
"""Maximum number of numbers with 20 or more characters, or with an exponent of two or more digits:
15 us each."""
MAX_NUMBER_CHARS = 128
_SLICE_BYTES = 64 * 1024
_SLOW_NUMBER = re.compile(rb"[-+.0-9eE]{20,}|[.0-9][eE][-+]?[0-9]{2}")


class JsonCounts(msgspec.Struct):
    """Counts of the parts of a JSON text; the contents of strings are only scanned for escapes."""

    values: int = 1
    nodes: int = 0
    slow_numbers: int = 0
    escapes: int = 0
    longest_number: int = 0


def check_size(body: bytes) -> None:
    """Raises `BadRequest` for a JSON text that would take too long to parse."""
    if len(body) <= COUNTED_BYTES:
        return
    parts = JsonCounts()
    for parts in count_json(body):
        for name, count, limit in (
            ("values", parts.values, MAX_VALUES),
            ("arrays, objects and texts", parts.nodes, MAX_NODES),
            ("numbers with exponents or many digits", parts.slow_numbers, MAX_SLOW_NUMBERS),
            ("escapes in its texts", parts.escapes, MAX_ESCAPES),
            ("characters in a number", parts.longest_number, MAX_NUMBER_CHARS),
        ):
            if count > limit:
                raise BadRequest(
                    f"the body has more than {limit} {name}, the limit; split the request, or "
                    "send texts in UTF-8 without escapes",
                    code="request_too_large",
                )


def count_json(body: bytes) -> Iterator[JsonCounts]:
    """Yields the counts so far after each slice. For a text that is not JSON, the counts are
    meaningless, but the work is the same."""
    parts, at, quotes = JsonCounts(), 0, 0
    while at < len(body):
        end = _end_of_slice(body, at)
        text = body[at:end]
        at = end
        parts.escapes += text.count(b"\\")
        pieces = text.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b'"'.join(pieces[quotes % 2 :: 2])
        quotes += len(pieces) - 1
        parts.values += outside.count(b",")
        parts.nodes += outside.count(b"[") + outside.count(b"{") + len(pieces) // 2
        slow = _SLOW_NUMBER.findall(outside)
        parts.slow_numbers += len(slow)
        parts.longest_number = max([parts.longest_number, *map(len, slow)])
        yield parts


def _end_of_slice(body: bytes, at: int) -> int:
    """Returns the end of a slice, which never separates a backslash from the character that it
    escapes."""
    end = at + _SLICE_BYTES
    if body[end - 1 : end] != b"\\":
        return end
    run = len(body[at:end]) - len(body[at:end].rstrip(b"\\"))
    return end + run % 2
