"""Hashes of the blocks of prompts, and index of the engines that probably hold each block. Pure.

Invariant: an engine that holds a block of a chain holds all blocks before it. So a binary search
finds the longest prefix that any engine of a set holds.

Like the block hashes of engines (`engine/kv/block_hash.py`), each hash covers the salt and every
token up to the end of its block. They are compared only within one process, and only routing
depends on them. So they are Python's own hashes, which take less than half the time of chained
digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence, Set

from swell.engine.kv.block_hash import pack_tokens, root_of

_DIGEST_BYTES = 16


class PromptBlocks:
    """The blocks of one prompt."""

    def __init__(self, token_ids: Sequence[int], block_tokens: int, salt: str | None) -> None:
        """`salt` separates tenants."""
        packed = pack_tokens(token_ids)
        self.num_tokens = len(packed)
        self._size = block_tokens * packed.itemsize
        self._salt, self._tokens = salt, packed.tobytes()
        self.names: list[int] = []
        """The hash of each full block, valid only in this process."""
        name, tokens, size = hash(salt), self._tokens, self._size
        for start in range(0, len(tokens) - size + 1, size):
            name = hash((name, tokens[start : start + size]))
            self.names.append(name)

    def digest(self, num_blocks: int) -> bytes:
        """Returns a digest of the first `num_blocks` blocks: 16 bytes, equal in all ingresses."""
        text = root_of(self._salt) + self._tokens[: num_blocks * self._size]
        return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()


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
