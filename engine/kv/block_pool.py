"""The pool of KV blocks of one engine: which blocks are held, free, or cached.

A block is *held* while its reference count is above zero. A block without references is *free*, and
still *cached* if it has a hash: a request with the same prefix can reuse it. Free blocks wait in a
queue; allocation takes blocks from its front and removes their hashes. Blocks without a hash enter
the queue at the front, cached blocks at the back, so that the least recently used prefix is evicted
first.

Cached blocks of sessions are *kept*, even if other requests share them: they wait in a second
queue, from which allocation takes blocks only if the first queue is empty. If the second queue
exceeds its limit, the least recently used blocks move to the back of the first queue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Manages KV blocks. Invariant: every block is either held or free."""

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[int, bytes], None] = lambda block, block_hash: None,
        max_kept: int = 0,
    ) -> None:
        """`on_evict` is called with a block that loses its cached content, and its hash. At most
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
        """Whether a block goes to the queue of kept blocks when it becomes free, while it is
        cached."""

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._kept)

    def num_free_among(self, block_ids: Iterable[int]) -> int:
        """Returns how many of these cached blocks would leave the free queues if they were held."""
        return sum(1 for block in block_ids if self._references[block] == 0)

    def allocate(self, count: int) -> list[int]:
        """Holds `count` blocks with undefined content and returns them. The caller has checked
        `num_free`."""
        assert count <= self.num_free, f"{count} blocks requested, {self.num_free} free"
        blocks = []
        for _ in range(count):
            block, _none = (self._free or self._kept).popitem(last=False)
            block_hash = self._block_hashes[block]
            if block_hash is not None:
                del self._cached[block_hash]
                self._forget(block)
                self._on_evict(block, block_hash)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def touch(self, block_ids: Iterable[int]) -> None:
        """Holds cached blocks."""
        for block in block_ids:
            if self._references[block] == 0:
                self._queue_of(block).pop(block)
            self._references[block] += 1

    def free(self, block_ids: Sequence[int], *, keep: bool = False) -> None:
        """Releases a request's blocks, the end of the chain first, because it is shared least. With
        `keep`, the cached ones among them are kept."""
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

    def cache_block(self, block: int, block_hash: bytes) -> None:
        """Adds a full block to the prefix cache, unless another block has this hash."""
        if self._block_hashes[block] is None and block_hash not in self._cached:
            self._cached[block_hash] = block
            self._block_hashes[block] = block_hash

    def evict_hashes(self, block_hashes: Iterable[bytes]) -> None:
        """Removes the blocks with these hashes from the prefix cache; requests that hold them keep
        them."""
        for block_hash in block_hashes:
            block = self._cached.pop(block_hash, None)
            if block is not None:
                self._forget(block)
                if block in self._kept:
                    del self._kept[block]
                    self._free[block] = None
                    self._free.move_to_end(block, last=False)

    def get_cached_block(self, block_hash: bytes) -> int | None:
        """Returns the block with this hash, or None."""
        return self._cached.get(block_hash)

    def reset_prefix_cache(self) -> None:
        """Removes every hash: no block that was written so far is found again."""
        self._cached.clear()
        self._block_hashes = [None] * self.num_blocks
        self._is_kept = [False] * self.num_blocks
        self._free.update(self._kept)
        self._kept.clear()

    def check_idle(self) -> None:
        """Raises AssertionError unless every block is free. For an idle engine: detects leaked
        blocks."""
        leaked = self.num_blocks - self.num_free
        assert leaked == 0, f"{leaked} blocks leaked"

    def _forget(self, block: int) -> None:
        """Marks a block as no longer cached."""
        self._block_hashes[block] = None
        self._is_kept[block] = False

    def _queue_of(self, block: int) -> OrderedDict[int, None]:
        """Returns the queue in which a free block waits."""
        return self._kept if block in self._kept else self._free
