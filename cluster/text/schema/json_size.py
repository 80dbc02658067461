"""How much work a JSON text is, before it is read.

Reading one is a single call that holds the interpreter's lock, so nothing else of the process goes
on meanwhile. How long it takes depends on what the text holds more than on its length: measured, a
text of 16 MiB that is one string takes 15 ms, as many empty arrays as fit take 2 s, and as many
numbers like 1e300 take 40 s. So the parts of a text are counted first, in slices that let others
go on, and what would take more than some 50 ms is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from swell.cluster.text.sampling_params import BadRequest

COUNTED_BYTES = 8 * 1024
"""A shorter text is read as it is: some milliseconds, whatever it holds."""
MAX_VALUES = 512 * 1024
"""Values of all kinds: the token ids of four prompts of 128k tokens."""
MAX_NODES = 128 * 1024
"""Arrays, objects, strings and keys."""
MAX_ESCAPES = 1024 * 1024
"""Backslashes in strings. Writers that escape what is not ASCII need one for each such character,
and two for those beyond U+FFFF."""
MAX_SLOW_NUMBERS = 2048
"""Numbers of 20 characters and more, or with an exponent of two digits and more: 15 us each."""
MAX_NUMBER_CHARS = 128
_SLICE_BYTES = 64 * 1024
_SLOW_NUMBER = re.compile(rb"[-+.0-9eE]{20,}|[.0-9][eE][-+]?[0-9]{2}")


class JsonCounts(msgspec.Struct):
    """What a JSON text holds; the strings' contents are not looked into."""

    values: int = 1
    nodes: int = 0
    slow_numbers: int = 0
    escapes: int = 0
    longest_number: int = 0


def check_size(body: bytes) -> None:
    """Raises `BadRequest` for a JSON text that would take too long to read."""
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
                    f"the body holds more than {limit} {name}, and at most so many are allowed; "
                    "split the request, or send texts in UTF-8 without escapes",
                    code="request_too_large",
                )


def count_json(body: bytes) -> Iterator[JsonCounts]:
    """What has been counted so far, slice by slice. Of a text that is no JSON the counts mean
    nothing, but the work is the same."""
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
    """Not between a backslash and what it escapes: a run of backslashes stays together."""
    end = at + _SLICE_BYTES
    if body[end - 1 : end] != b"\\":
        return end
    run = len(body[at:end]) - len(body[at:end].rstrip(b"\\"))
    return end + run % 2
