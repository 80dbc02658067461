"""Engines on a ring, so that all ingresses consider the same few of many for a conversation. Pure.

An engine that comes or goes changes one of the few, and only near its place on the ring.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable

_DIGEST_BYTES = 8


class HashRing:
    """Ranks at the places of their hashes."""

    def __init__(self, ranks: Iterable[int]) -> None:
        points = sorted((_place(rank.to_bytes(4, "little")), rank) for rank in ranks)
        self._places = [place for place, _ in points]
        self._ranks = [rank for _, rank in points]

    def neighbours(self, key: bytes, count: int) -> list[int]:
        """So many ranks from the place of a key on; fewer if there are fewer."""
        start = bisect_left(self._places, _place(key))
        chosen = self._ranks[start : start + count]
        return chosen + self._ranks[: min(start, count - len(chosen))]


def _place(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=_DIGEST_BYTES).digest()
