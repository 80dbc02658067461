"""Tiers to which KV blocks are offloaded from the device: host memory, then disk. Pure.

    device pool ──save──► memory ──spill──► disk
         ▲                  │                 │
         └──────load────────┴─────────────────┘

A tier holds hashed blocks and evicts the least recently used one first. A block stays in its tier
when it is loaded, so that it need not be saved again. Every worker holds its shard of each block at
the same place, so one list of copies applies to all workers: they execute it in order, before the
step with which it is sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from swell.worker.wire import DEVICE, BlockCopy


class _Tier:
    """The places of one kind of memory: 0 .. size - 1."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.blocks: OrderedDict[bytes, int] = OrderedDict()
        """Hash -> place, the least recently used first."""
        self.free = list(range(size))[::-1]


class OffloadTiers:
    """The tiers of one engine, with their sizes in blocks; a tier of size 0 is omitted."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._tiers: list[_Tier] = []
        self._copies: list[BlockCopy] = []
        self._pinned: set[bytes] = set()
        self.num_saved = 0
        """Number of blocks that were copied from the device."""
        self.num_loaded = 0
        """Number of blocks that were copied back to the device."""
        self.reset()

    def reset(self) -> None:
        """Empties all tiers: the content of every block may be lost, and pending copies are
        dropped."""
        pairs = enumerate(self._sizes, start=1)
        self._tiers = [_Tier(number, size) for number, size in pairs if size]
        self._copies.clear()
        self._pinned.clear()

    def has(self, block_hash: bytes) -> bool:
        return any(block_hash in tier.blocks for tier in self._tiers)

    def pin(self, block_hashes: Iterable[bytes]) -> None:
        """Protects these blocks from eviction until `unpin`, and marks them as used."""
        for block_hash in block_hashes:
            self._pinned.add(block_hash)
            self._use(block_hash)

    def unpin(self) -> None:
        self._pinned.clear()

    def save(self, block: int, block_hash: bytes) -> None:
        """Saves a block that the device is about to evict."""
        if self.has(block_hash):
            self._use(block_hash)
        elif self._put(0, block_hash, DEVICE, block):
            self.num_saved += 1

    def load(self, block_hash: bytes, block: int) -> None:
        """Copies a pinned block to this block of the device."""
        tier = next(tier for tier in self._tiers if block_hash in tier.blocks)
        self._copies.append(BlockCopy(tier.number, tier.blocks[block_hash], DEVICE, block))
        self.num_loaded += 1

    def forget(self, block_hashes: Iterable[bytes]) -> None:
        """Drops blocks whose content is invalid."""
        for block_hash in block_hashes:
            for tier in self._tiers:
                block = tier.blocks.pop(block_hash, None)
                if block is not None:
                    tier.free.append(block)

    def take_copies(self) -> list[BlockCopy]:
        """Returns the copies for the next step, and clears them."""
        copies, self._copies = self._copies, []
        return copies

    def _use(self, block_hash: bytes) -> None:
        for tier in self._tiers:
            if block_hash in tier.blocks:
                tier.blocks.move_to_end(block_hash)

    def _put(self, index: int, block_hash: bytes, source_tier: int, source_block: int) -> bool:
        """Copies a block to a tier. If the tier is full, its least recently used block moves to the
        next tier first. Returns False if every block there is pinned, or if there is no such
        tier."""
        if index == len(self._tiers):
            return False
        tier = self._tiers[index]
        if tier.free:
            place = tier.free.pop()
        else:
            oldest = next(iter(tier.blocks))
            if oldest in self._pinned:  # then all are, since pinning counts as use
                return False
            place = tier.blocks.pop(oldest)
            if not self.has(oldest):
                self._put(index + 1, oldest, tier.number, place)
        tier.blocks[block_hash] = place
        self._copies.append(BlockCopy(source_tier, source_block, tier.number, place))
        return True
