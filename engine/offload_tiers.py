"""Where KV blocks go that leave the device: to host memory, and from there to disk. Pure.

    device pool ──save──► memory ──spill──► disk
         ▲                  │                 │
         └──────load────────┴─────────────────┘

A tier holds named blocks, of which the least recently used goes first. What is held in a tier stays
there when it is loaded, so that it need not be saved again. Every worker holds its part of each
block at the same place, so that one list of copies holds for all of them: they carry it out in
order, before the step that it comes with.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from swell.worker.wire import DEVICE, BlockCopy


class _Tier:
    """Blocks of one kind of memory: 0 .. size - 1."""

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.blocks: OrderedDict[bytes, int] = OrderedDict()
        """Name -> block, the least recently used first."""
        self.free = list(range(size))[::-1]


class OffloadTiers:
    """The tiers of one engine, by their sizes in blocks; a tier of no blocks is left out."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._tiers: list[_Tier] = []
        self._copies: list[BlockCopy] = []
        self._pinned: set[bytes] = set()
        self.num_saved = 0
        """Blocks that were copied from the device."""
        self.num_loaded = 0
        """Blocks that were copied back to it."""
        self.reset()

    def reset(self) -> None:
        """Hold nothing: the content of every block may be lost, and copies that no step has taken
        will not be made."""
        pairs = enumerate(self._sizes, start=1)
        self._tiers = [_Tier(number, size) for number, size in pairs if size]
        self._copies.clear()
        self._pinned.clear()

    def has(self, name: bytes) -> bool:
        return any(name in tier.blocks for tier in self._tiers)

    def pin(self, names: Iterable[bytes]) -> None:
        """Keep these blocks until `unpin`; they count as used now."""
        for name in names:
            self._pinned.add(name)
            self._use(name)

    def unpin(self) -> None:
        self._pinned.clear()

    def save(self, block: int, name: bytes) -> None:
        """The device is about to lose this block."""
        if self.has(name):
            self._use(name)
        elif self._put(0, name, DEVICE, block):
            self.num_saved += 1

    def load(self, name: bytes, block: int) -> None:
        """Copy a pinned block to this block of the device."""
        tier = next(tier for tier in self._tiers if name in tier.blocks)
        self._copies.append(BlockCopy(tier.number, tier.blocks[name], DEVICE, block))
        self.num_loaded += 1

    def forget(self, names: Iterable[bytes]) -> None:
        """What these blocks hold is invalid."""
        for name in names:
            for tier in self._tiers:
                block = tier.blocks.pop(name, None)
                if block is not None:
                    tier.free.append(block)

    def take_copies(self) -> list[BlockCopy]:
        """Copies for the next step."""
        copies, self._copies = self._copies, []
        return copies

    def _use(self, name: bytes) -> None:
        for tier in self._tiers:
            if name in tier.blocks:
                tier.blocks.move_to_end(name)

    def _put(self, index: int, name: bytes, source_tier: int, source_block: int) -> bool:
        """Copy a block to a tier; False: every block there is pinned, or there is no such tier.
        What has to go there for it goes on to the next tier, before."""
        if index == len(self._tiers):
            return False
        tier = self._tiers[index]
        if tier.free:
            place = tier.free.pop()
        else:
            oldest = next(iter(tier.blocks))
            if oldest in self._pinned:  # then all are, since pinning is a use
                return False
            place = tier.blocks.pop(oldest)
            if not self.has(oldest):
                self._put(index + 1, oldest, tier.number, place)
        tier.blocks[name] = place
        self._copies.append(BlockCopy(source_tier, source_block, tier.number, place))
        return True
