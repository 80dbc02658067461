"""Which engines probably hold which KV blocks. Pure.

Law: an engine that holds a block of a chain holds all blocks before it. So the longest prefix that
any of some engines holds is found by bisection.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set


class PrefixIndex:
    """The ranks that hold each block, by its hash. Most blocks are held by one engine: that one's
    rank stands in place of a set."""

    def __init__(self) -> None:
        self._holders: dict[bytes, int | set[int]] = {}

    def __len__(self) -> int:
        """How many different blocks are held."""
        return len(self._holders)

    def add(self, block_hash: bytes, rank: int) -> None:
        known = self._holders.setdefault(block_hash, rank)
        if isinstance(known, set):
            known.add(rank)
        elif known != rank:
            self._holders[block_hash] = {known, rank}

    def discard(self, block_hash: bytes, rank: int) -> None:
        known = self._holders.get(block_hash)
        if isinstance(known, set):
            known.discard(rank)
            if len(known) == 1:
                self._holders[block_hash] = known.pop()
        elif known == rank:
            del self._holders[block_hash]

    def holders(self, block_hash: bytes) -> Collection[int]:
        known = self._holders.get(block_hash)
        if known is None:
            return ()
        return known if isinstance(known, set) else (known,)

    def longest(self, block_hashes: Sequence[bytes], ranks: Set[int]) -> int:
        """How many blocks of this chain one of these engines holds, at most."""
        least, most = 0, len(block_hashes)
        if not block_hashes or ranks.isdisjoint(self.holders(block_hashes[0])):
            return 0
        while least < most:
            middle = (least + most + 1) // 2
            if ranks.isdisjoint(self.holders(block_hashes[middle - 1])):
                most = middle - 1
            else:
                least = middle
        return least
