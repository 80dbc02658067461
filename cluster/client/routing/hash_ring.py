"""Consistent hashing: all ingresses choose the same few engines for a conversation. Pure.

An engine that joins or leaves changes one of the chosen engines, and only for keys near its place
on the ring.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable

_DIGEST_BYTES = 8


class HashRing:
    """Ranks of engines on a ring, each at the place of its hash."""

    def __init__(self, ranks: Iterable[int]) -> None:
        points = sorted((_place(rank.to_bytes(4, "little")), rank) for rank in ranks)
        self._places = [place for place, _ in points]
        self._ranks = [rank for _, rank in points]

    def neighbours(self, key: bytes, count: int) -> list[int]:
        """Returns up to `count` ranks that follow the place of a key on the ring."""
        start = bisect_left(self._places, _place(key))
        chosen = self._ranks[start : start + count]
        return chosen + self._ranks[: min(start, count - len(chosen))]


def _place(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=_DIGEST_BYTES).digest()
