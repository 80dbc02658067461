"""KV blocks of one engine: which are held, which are free, which are cached.

A block is *held* while its reference count is above zero. A block without references is *free*,
and it is still *cached* if its name is known: a request with the same prefix takes it back. Free
blocks wait in a queue; allocation takes from its front and forgets the block's name. Blocks
without a name enter at the front, named ones at the back, so that the least recently used
prefix goes first.

Cached blocks of sessions are *kept*, also where other requests share them: they wait in a queue of
their own, from which allocation takes only when the other is empty. Where more wait there than may,
the least recently used are kept no longer, and go to the other queue, as what was used last there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Invariant: every block is either held or free."""

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[int, bytes], None] = lambda block, name: None,
        max_kept: int = 0,
    ) -> None:
        """`on_evict` is called with a block whose content is found no more, and its name. At most
        `max_kept` free blocks are kept."""
        self.num_blocks = num_blocks
        self._max_kept = max_kept
        self._on_evict = on_evict
        self._references = [0] * num_blocks
        self._block_hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._is_kept = [False] * num_blocks
        """Where a block goes when it is free, as long as it is cached."""

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._kept)

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """How many of these cached blocks leave the free queue when they are held."""
        return sum(1 for block in block_ids if self._references[block] == 0)

    def allocate(self, count: int) -> list[int]:
        """Hold `count` blocks of undefined content. The caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} free"
        blocks = []
        for _ in range(count):
            block, _none = (self._free or self._kept).popitem(last=False)
            name = self._block_hashes[block]
            if name is not None:
                del self._cached[name]
                self._forget(block)
                self._on_evict(block, name)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def touch(self, block_ids: Iterable[int]) -> None:
        """Hold blocks that `find` gave."""
        for block in block_ids:
            if self._references[block] == 0:
                self._queue_of(block).pop(block)
            self._references[block] += 1

    def free(self, block_ids: Sequence[int], *, keep: bool = False) -> None:
        """Let go of a request's blocks, the end of the chain first: it is the least shared. With
        `keep`, what is cached of them is kept."""
        for block in reversed(block_ids):
            self._references[block] -= 1
            self._is_kept[block] |= keep and self._block_hashes[block] is not None
            if self._references[block] == 0:
                is_cached = self._block_hashes[block] is not None
                queue = self._kept if self._is_kept[block] else self._free
                queue[block] = None
                queue.move_to_end(block, last=is_cached)
        while len(self._kept) > self._max_kept:
            block, _none = self._kept.popitem(last=False)
            self._is_kept[block] = False
            self._free[block] = None

    def cache_block(self, block: int, name: bytes) -> None:
        """Make a full block findable. The first block of a name keeps it."""
        if self._block_hashes[block] is None and name not in self._cached:
            self._cached[name] = block
            self._block_hashes[block] = name

    def evict_hashes(self, block_hashes: Iterable[bytes]) -> None:
        """Remove the blocks with these block_hashes from the prefix cache; requests that hold them
        keep them."""
        for name in block_hashes:
            block = self._cached.pop(name, None)
            if block is not None:
                self._forget(block)
                if block in self._kept:
                    del self._kept[block]
                    self._free[block] = None
                    self._free.move_to_end(block, last=False)

    def get_cached_block(self, name: bytes) -> int | None:
        """The block of this name; None: there is none."""
        return self._cached.get(name)

    def reset_prefix_cache(self) -> None:
        """Remove every hash: no block that was written so far is found again."""
        self._cached.clear()
        self._block_hashes = [None] * self.num_blocks
        self._is_kept = [False] * self.num_blocks
        self._free.update(self._kept)
        self._kept.clear()

    def check_idle(self) -> None:
        """Raise AssertionError unless every block is free: the conservation check when idle."""
        leaked = self.num_blocks - self.num_free
        assert leaked == 0, f"{leaked} blocks leaked"

    def _forget(self, block: int) -> None:
        """It is cached no more."""
        self._block_hashes[block] = None
        self._is_kept[block] = False

    def _queue_of(self, block: int) -> OrderedDict[int, None]:
        """Where a free block waits."""
        return self._kept if block in self._kept else self._free
