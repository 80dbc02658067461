"""Memory planning: offsets for buffers that are used at different times."""

from __future__ import annotations

from typing import NamedTuple

ALIGNMENT = 64
"""Bytes of a cache line."""


class Lifetime(NamedTuple):
    """A buffer of `size` bytes that is in use from step `first` to step `last`, inclusive."""

    first: int
    last: int
    size: int


def assign_offsets(buffers: list[Lifetime]) -> tuple[list[int], int]:
    """Returns the offset of each buffer, so that buffers in use at the same time do not overlap,
    and the total bytes.

    First fit, in the order of first use: each buffer gets the lowest free offset.
    """
    offsets = [0] * len(buffers)
    placed: list[int] = []
    total = 0
    for i in sorted(range(len(buffers)), key=lambda i: buffers[i].first):
        buffer, offset = buffers[i], 0
        in_use = [j for j in placed if buffers[j].last >= buffer.first]
        for j in sorted(in_use, key=lambda j: offsets[j]):
            if offset + buffer.size <= offsets[j]:
                break
            offset = max(offset, offsets[j] + _aligned(buffers[j].size))
        offsets[i] = offset
        placed.append(i)
        total = max(total, offset + buffer.size)
    return offsets, total


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
