"""Index of the engines that probably hold each KV block. Pure.

Invariant: an engine that holds a block of a chain holds all blocks before it. So a binary search
finds the longest prefix that any engine of a set holds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set


class PrefixIndex:
    """The ranks that hold each block, by the block's hash. Most blocks are held by one engine: its
    rank is then stored instead of a set."""

    def __init__(self) -> None:
        self._holders: dict[int, int | set[int]] = {}

    def __len__(self) -> int:
        """Number of different blocks that any engine holds."""
        return len(self._holders)

    def add(self, name: int, rank: int) -> None:
        known = self._holders.setdefault(name, rank)
        if isinstance(known, set):
            known.add(rank)
        elif known != rank:
            self._holders[name] = {known, rank}

    def discard(self, name: int, rank: int) -> None:
        known = self._holders.get(name)
        if isinstance(known, set):
            known.discard(rank)
            if len(known) == 1:
                self._holders[name] = known.pop()
        elif known == rank:
            del self._holders[name]

    def holders(self, name: int) -> Collection[int]:
        known = self._holders.get(name)
        if known is None:
            return ()
        return known if isinstance(known, set) else (known,)

    def longest(self, names: Sequence[int], ranks: Set[int]) -> int:
        """Returns the length, in blocks, of the longest prefix of this chain that one of these
        engines holds."""
        least, most = 0, len(names)
        if not names or ranks.isdisjoint(self.holders(names[0])):
            return 0
        while least < most:
            middle = (least + most + 1) // 2
            if ranks.isdisjoint(self.holders(names[middle - 1])):
                most = middle - 1
            else:
                least = middle
        return least
